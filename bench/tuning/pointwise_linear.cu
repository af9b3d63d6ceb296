// Which loads, stores, unrolling and block size relu((a + b) * c) wants: the measurements behind
// pointwise_linear_kernel. Build and run on the card:
//   nvcc -O3 -std=c++17 -arch=sm_90a -I csrc/kernels -o /tmp/tune bench/tuning/pointwise_linear.cu
//   && /tmp/tune
// Prints microseconds a launch (median of 9 graph replays of 20 launches over rotating buffers) for
// each variant.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "check.cuh"
#include "common/activation.cuh"
#include "common/vec.cuh"

namespace fusedcuda {

enum Load { kPlain, kReadOnly, kNoAllocate, kStreaming };
enum Store { kWriteBack, kEvictFirst };
// Programmatic dependent launch: the next kernel's blocks may start before this one is done and
// wait for its memory.
enum Dependent { kOff, kWaitOnly, kTriggerFirst, kTriggerAfterLoads };

template <Load kLoad>
__device__ __forceinline__ int4 load(const int4* p) {
  int4 r;
  if constexpr (kLoad == kPlain) {
    r = *p;
  } else if constexpr (kLoad == kReadOnly) {
    r = __ldg(p);
  } else if constexpr (kLoad == kStreaming) {
    r = __ldcs(p);
  } else {
    asm("ld.global.nc.L1::no_allocate.v4.s32 {%0, %1, %2, %3}, [%4];"
        : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
        : "l"(p));
  }
  return r;
}

template <typename T, int kUnroll, Load kLoad, Store kStore, bool kRuntime, bool kPersistent,
          Dependent kPdl>
__global__ void add_mul_kernel(const int4* a, const int4* b, const int4* c, int4* out, long vectors,
                               Activation activation) {
  constexpr int kVec = kVectorWidth<T>;
  if (kPdl == kTriggerFirst) asm volatile("griddepcontrol.launch_dependents;");
  if (kPdl != kOff) asm volatile("griddepcontrol.wait;" ::: "memory");
  for (long block = blockIdx.x; block * blockDim.x * kUnroll < vectors; block += gridDim.x) {
    const long first = block * blockDim.x * kUnroll + threadIdx.x;
    int4 in[kUnroll][3];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const long i = first + u * blockDim.x;
      if (i < vectors) {
        in[u][0] = load<kLoad>(a + i);
        in[u][1] = load<kLoad>(b + i);
        in[u][2] = load<kLoad>(c + i);
      }
    }
    if (kPdl == kTriggerAfterLoads) asm volatile("griddepcontrol.launch_dependents;");
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const long i = first + u * blockDim.x;
      if (i >= vectors) break;
      float x[3][kVec], z[kVec], y[kVec];
#pragma unroll
      for (int k = 0; k < 3; ++k)
        unpack<T, kVec>(*reinterpret_cast<Vector<T, kVec>*>(&in[u][k]), x[k]);
#pragma unroll
      for (int j = 0; j < kVec; ++j) z[j] = (x[0][j] + x[1][j]) * x[2][j];
      if (kRuntime) {
        activate<sizeof(T) == 2>(activation, z, y);
      } else {
#pragma unroll
        for (int j = 0; j < kVec; ++j) y[j] = z[j] <= 0 ? 0 : z[j];
      }
      Vector<T, kVec> v = pack<T, kVec>(y);
      const int4 raw = *reinterpret_cast<int4*>(&v);
      if (kStore == kEvictFirst) {
        __stcs(out + i, raw);
      } else {
        out[i] = raw;
      }
    }
    if (!kPersistent) break;
  }
}

float* g_buffers[4];

template <typename T, int kUnroll, Load kLoad, Store kStore, bool kRuntime,
          bool kPersistent = false, Dependent kPdl = kOff>
float time_variant(long n, int threads, int copies, cudaStream_t stream) {
  constexpr int kVec = kVectorWidth<T>;
  const long vectors = n / kVec;
  long blocks = (vectors + threads * kUnroll - 1) / (threads * kUnroll);
  if (kPersistent) blocks = std::min<long>(blocks, 132L * (2048 / threads));
  const int launches = n > (1 << 24) ? 3 : 40;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  for (int i = 0; i < launches; ++i) {
    const long offset = (i % copies) * vectors;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(threads);
    config.stream = stream;
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    config.numAttrs = kPdl == kOff ? 0 : 1;
    CHECK(cudaLaunchKernelEx(
        &config, add_mul_kernel<T, kUnroll, kLoad, kStore, kRuntime, kPersistent, kPdl>,
        reinterpret_cast<const int4*>(g_buffers[0]) + offset,
        reinterpret_cast<const int4*>(g_buffers[1]) + offset,
        reinterpret_cast<const int4*>(g_buffers[2]) + offset,
        reinterpret_cast<int4*>(g_buffers[3]) + offset, vectors, Activation::kRelu));
  }
  CHECK(cudaGetLastError());
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphInstantiate(&exec, graph, 0));
  cudaEvent_t start, stop;
  CHECK(cudaEventCreate(&start));
  CHECK(cudaEventCreate(&stop));
  std::vector<float> times;
  for (int r = 0; r < 10; ++r) {
    CHECK(cudaEventRecord(start, stream));
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaEventRecord(stop, stream));
    CHECK(cudaEventSynchronize(stop));
    float ms;
    CHECK(cudaEventElapsedTime(&ms, start, stop));
    if (r > 0) times.push_back(ms * 1000 / launches);
  }
  CHECK(cudaGraphExecDestroy(exec));
  CHECK(cudaGraphDestroy(graph));
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

__global__ void fill(float* p, long n, unsigned seed) {
  for (long i = blockIdx.x * (long)blockDim.x + threadIdx.x; i < n;
       i += (long)gridDim.x * blockDim.x) {
    unsigned h = (unsigned)i * 2654435761u + seed;
    h ^= h >> 15;
    h *= 2246822519u;
    h ^= h >> 13;
    // Two halves that are ordinary numbers both as one float and as two bf16.
    p[i] = __uint_as_float((h & 0x807f807fu) | 0x3f003f00u | (h & 0x00800080u));
  }
}

// Cache hints, at one block size and without dependent launch.
template <typename T>
void hints(const char* dtype, long n, int copies, cudaStream_t s) {
  constexpr int kThreads = 256;
  std::printf(
      "%-5s n=%-10ld ldg %8.3f no_allocate %8.3f cs %8.3f ldg+stcs %8.3f cs+stcs %8.3f persistent "
      "%8.3f\n",
      dtype, n, time_variant<T, 2, kReadOnly, kWriteBack, false>(n, kThreads, copies, s),
      time_variant<T, 2, kNoAllocate, kWriteBack, false>(n, kThreads, copies, s),
      time_variant<T, 2, kStreaming, kWriteBack, false>(n, kThreads, copies, s),
      time_variant<T, 2, kReadOnly, kEvictFirst, false>(n, kThreads, copies, s),
      time_variant<T, 2, kStreaming, kEvictFirst, false>(n, kThreads, copies, s),
      time_variant<T, 2, kReadOnly, kWriteBack, false, true>(n, kThreads, copies, s));
}

template <typename T, int kUnroll, bool kRuntime>
void row(const char* dtype, long n, int threads, int copies, cudaStream_t s) {
  std::printf(
      "%-5s n=%-10ld unroll %d threads %4d %s | off %8.3f wait %8.3f trigger first %8.3f trigger "
      "after loads "
      "%8.3f\n",
      dtype, n, kUnroll, threads, kRuntime ? "run-time act" : "relu        ",
      time_variant<T, kUnroll, kReadOnly, kWriteBack, kRuntime>(n, threads, copies, s),
      time_variant<T, kUnroll, kReadOnly, kWriteBack, kRuntime, false, kWaitOnly>(n, threads,
                                                                                  copies, s),
      time_variant<T, kUnroll, kReadOnly, kWriteBack, kRuntime, false, kTriggerFirst>(n, threads,
                                                                                      copies, s),
      time_variant<T, kUnroll, kReadOnly, kWriteBack, kRuntime, false, kTriggerAfterLoads>(
          n, threads, copies, s));
}

template <typename T>
void sweep(const char* dtype, long n, int copies, cudaStream_t s) {
  for (int threads : {128, 256, 512, 1024}) {
    row<T, 1, false>(dtype, n, threads, copies, s);
    row<T, 1, true>(dtype, n, threads, copies, s);
    row<T, 2, false>(dtype, n, threads, copies, s);
    row<T, 2, true>(dtype, n, threads, copies, s);
  }
}

}  // namespace fusedcuda

int main() {
  using namespace fusedcuda;
  cudaStream_t s;
  CHECK(cudaStreamCreate(&s));
  const long floats = 100000000;
  for (float*& buffer : g_buffers) {
    CHECK(cudaMalloc(&buffer, floats * sizeof(float)));
    fill<<<4096, 256, 0, s>>>(buffer, floats, 17u * (unsigned)(&buffer - g_buffers + 1));
  }
  CHECK(cudaStreamSynchronize(s));
  hints<float>("fp32", floats, 1, s);
  hints<__nv_bfloat16>("bf16", floats, 2, s);
  sweep<float>("fp32", floats, 1, s);
  sweep<__nv_bfloat16>("bf16", floats, 2, s);
  std::printf("-- 1024x1024, one buffer set (in the L2)\n");
  sweep<float>("fp32", 1 << 20, 1, s);
  sweep<__nv_bfloat16>("bf16", 1 << 20, 1, s);
  std::printf("-- 1024x1024, rotating over 40 sets\n");
  sweep<float>("fp32", 1 << 20, 40, s);
  sweep<__nv_bfloat16>("bf16", 1 << 20, 40, s);
  return 0;
}
