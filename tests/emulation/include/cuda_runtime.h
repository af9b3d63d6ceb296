// The CUDA language and runtime for a CPU, as far as the kernels use them: first on the include
// path, it lets g++ -D__CUDACC__ compile a .cu file unchanged. execution.cpp runs the threads;
// headers with inline PTX call `emulation` where FUSEDCUDA_EMULATION is defined.
#pragma once

#include <assert.h>
#include <math.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>

#define FUSEDCUDA_EMULATION

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...) static_assert(false, "the size of a cluster is a launch option")
#define __grid_constant__
#define __align__(bytes) alignas(bytes)
// One copy for a block, undefined when it starts: execution.cpp finds the library's thread-local
// variables, fills them before a block and exchanges them between the blocks of a cluster.
#define __shared__ static thread_local

struct uint3 {
  unsigned x, y, z;
};

struct dim3 : uint3 {
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : uint3{x, y, z} {}
};

struct alignas(8) float2 {
  float x, y;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) double2 {
  double x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline double2 make_double2(double x, double y) { return {x, y}; }

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

// ---- What kernels call: execution.cpp
// ------------------------------------------------------------

namespace emulation {

constexpr int kLanes = 32;
constexpr unsigned kAllLanes = 0xffffffff;

// Ends the kernel with an error: "thread (x, y, z)" and `what`, which must outlive the kernel.
[[noreturn]] void complain(const char* what);

void barrier(int line);
void wait_for_previous_kernel();

int lane();
// Waits for the other lanes of the warp; returns what each of them has brought.
const uint64_t* exchange(int line, unsigned participants, uint64_t value);

void* dynamic_shared();

void copy_async(void* shared, const void* global, size_t size);
void copy_async_commit();
void copy_async_wait(unsigned pending);

// What is at an address, once all that happens without it has happened.
unsigned poll(const unsigned* address);

unsigned cluster_rank();
unsigned cluster_size();
void cluster_arrive();
void cluster_wait();
void* map_to_cluster(void* shared, unsigned rank);

// ClusterMailbox: mailbox.cpp.
void mailbox_init(uint64_t* barrier);
void mailbox_expect(uint64_t* barrier, int bytes);
void mailbox_send(void* slot, uint64_t* barrier, unsigned rank, const void* value, size_t size);
void mailbox_wait(uint64_t* barrier, unsigned parity);

// Mbarrier, TMA, wgmma and mma (csrc/kernels/common): hopper.cpp.
void mbarrier_init(uint64_t* state, unsigned arrivals);
void mbarrier_arrive(uint64_t* state, unsigned rank, unsigned bytes);
void mbarrier_wait(uint64_t* state, unsigned parity);
void named_barrier(int id, int threads);
void load_box(const void* map, void* shared, uint64_t* barrier, int row, int column,
              unsigned blocks);
void load_bulk(void* shared, const void* global, unsigned bytes, uint64_t* barrier);
void store_box(const void* map, const void* shared, int row, int column);
void fence_shared_for_copies();
void commit_stores();
void wait_for_stores(unsigned pending);
uint64_t wgmma_factor(const void* shared, bool k_is_inner, int next_rows);
uint64_t wgmma_advance(uint64_t factor, int values);
void wgmma(float* sums, int n, uint64_t factor_a, uint64_t factor_b, bool accumulate, bool is_half);
void wgmma(float* sums, int n, const uint32_t (&a)[4], uint64_t factor_b, bool accumulate,
           bool is_half);
void multiply_tiles(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], bool is_half);
void wgmma_commit();
void wgmma_wait(unsigned pending);
void load_matrices(const void* row, bool transposed, uint32_t (&values)[4]);
void store_matrices(void* row, const uint32_t (&values)[4]);

// The value of lane `source`; of the lane itself if that lies outside of [first, last).
template <typename T>
T shuffle(int line, unsigned participants, T value, int source, int first, int last) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles take 4 or 8 bytes");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  const uint64_t* values = exchange(line, participants, bits);
  std::memcpy(&value, &values[source >= first && source < last ? source : lane()], sizeof(T));
  return value;
}

// The first lane of the group of `width` that this one is in.
inline int first_of_group(int width) {
  if (width < 1 || width > kLanes || (width & (width - 1)) != 0)
    complain(" shuffles in groups whose width is not a power of two up to 32");
  return lane() / width * width;
}

template <typename T>
T shuffle_index(int line, unsigned participants, T value, int source, int width = kLanes) {
  const int first = first_of_group(width);
  return shuffle(line, participants, value, first + (source & (width - 1)), first, first + width);
}
template <typename T>
T shuffle_up(int line, unsigned participants, T value, unsigned delta, int width = kLanes) {
  const int first = first_of_group(width);
  return shuffle(line, participants, value, lane() - static_cast<int>(delta), first, kLanes);
}
template <typename T>
T shuffle_down(int line, unsigned participants, T value, unsigned delta, int width = kLanes) {
  const int last = first_of_group(width) + width;
  return shuffle(line, participants, value, lane() + static_cast<int>(delta), 0, last);
}
template <typename T>
T shuffle_xor(int line, unsigned participants, T value, int lane_mask, int width = kLanes) {
  if (lane_mask < 0 || lane_mask >= kLanes) complain(" shuffles with a lane that does not exist");
  const int last = first_of_group(width) + width;
  return shuffle(line, participants, value, lane() ^ lane_mask, 0, last);
}

inline unsigned ballot(int line, unsigned participants, bool predicate) {
  const uint64_t* values = exchange(line, participants, predicate);
  unsigned bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= static_cast<unsigned>(values[i]) << i;
  return bits;
}

struct SyncWarp {
  int line;
  void operator()(unsigned participants = kAllLanes) const { exchange(line, participants, 0); }
};

}  // namespace emulation

// Macros, because the line tells one barrier from another.
#define __syncthreads() ::emulation::barrier(__LINE__)
#define __syncwarp \
  ::emulation::SyncWarp { __LINE__ }
#define __shfl_sync(...) ::emulation::shuffle_index(__LINE__, __VA_ARGS__)
#define __shfl_up_sync(...) ::emulation::shuffle_up(__LINE__, __VA_ARGS__)
#define __shfl_down_sync(...) ::emulation::shuffle_down(__LINE__, __VA_ARGS__)
#define __shfl_xor_sync(...) ::emulation::shuffle_xor(__LINE__, __VA_ARGS__)
#define __ballot_sync(...) ::emulation::ballot(__LINE__, __VA_ARGS__)
#define __any_sync(...) (__ballot_sync(__VA_ARGS__) != 0)
#define __all_sync(...) (__ballot_sync(__VA_ARGS__) == ::emulation::kAllLanes)

inline void cudaGridDependencySynchronize() { emulation::wait_for_previous_kernel(); }
inline void cudaTriggerProgrammaticLaunchCompletion() {}

[[noreturn]] inline void __trap() { emulation::complain(" traps"); }

inline void __threadfence() {}
inline void __threadfence_block() {}

// Threads run one after another.
template <typename T>
T atomicAdd(T* address, T value) {
  static_assert(std::is_same_v<T, int> || std::is_same_v<T, unsigned> || std::is_same_v<T, float> ||
                std::is_same_v<T, double> || std::is_same_v<T, unsigned long long>);
  const T before = *address;
  *address = before + value;
  return before;
}

// ---- Arithmetic
// ----------------------------------------------------------------------------------

using std::max;
using std::min;

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }

inline uint64_t __umul64hi(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b >> 64);
}

namespace emulation {
template <typename To, typename From>
To bits_as(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(&result, &x, sizeof(x));
  return result;
}
}  // namespace emulation
inline int __float_as_int(float x) { return emulation::bits_as<int>(x); }
inline unsigned __float_as_uint(float x) { return emulation::bits_as<unsigned>(x); }
inline float __int_as_float(int x) { return emulation::bits_as<float>(x); }
inline float __uint_as_float(unsigned x) { return emulation::bits_as<float>(x); }

// ---- The runtime: runtime.cpp
// --------------------------------------------------------------------

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorCooperativeLaunchTooLarge = 720,
  cudaErrorInvalidClusterSize = 912,
};
using cudaStream_t = void*;

inline cudaError_t cudaGetLastError() { return cudaSuccess; }

inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

// The GPU is an H200.
enum cudaDeviceAttr {
  cudaDevAttrComputeCapabilityMajor = 9,
  cudaDevAttrMultiProcessorCount = 132,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 227 << 10,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor = 228 << 10,
};
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute;  // the names stand for the values
  return cudaSuccess;
}

struct cudaFuncAttributes {
  int ptxVersion, numRegs;
};
template <typename... Params>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void (*)(Params...)) {
  attributes->ptxVersion = 90;
  attributes->numRegs = 168;
  return cudaSuccess;
}

enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
  cudaFuncAttributeNonPortableClusterSizeAllowed = 13,
};
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value);
template <typename... Params>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Params...), cudaFuncAttribute attribute,
                                 int value) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, value);
}

enum cudaLaunchAttributeID {
  cudaLaunchAttributeCooperative = 2,
  cudaLaunchAttributeClusterDimension = 4,
  cudaLaunchAttributeProgrammaticStreamSerialization = 6,
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  union {
    int cooperative;
    uint3 clusterDim;
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

template <typename... Params>
cudaError_t cudaOccupancyMaxActiveClusters(int* count, void (*)(Params...),
                                           const cudaLaunchConfig_t* config) {
  *count = 132 / static_cast<int>(config->attrs[0].val.clusterDim.x);
  return cudaSuccess;
}

namespace emulation {
// Runs the threads of a launch if a GPU would accept it. Throws std::runtime_error, with the
// thread and the block, for what execution.cpp finds.
cudaError_t launch(const void* kernel, const cudaLaunchConfig_t& config, size_t parameter_bytes,
                   const std::function<void()>& thread);
}  // namespace emulation

template <typename... Params, typename... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...),
                               const Args&... args) {
  const std::tuple<Params...> parameters(args...);
  return emulation::launch(reinterpret_cast<const void*>(kernel), *config,
                           (sizeof(Params) + ... + 0), [&] { std::apply(kernel, parameters); });
}
