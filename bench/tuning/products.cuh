// What the programs that time matrix products share: bf16 operands, contenders that take turns, and
// cuBLASLt as the one to beat.
#pragma once

#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "check.cuh"
#include "random_values.cuh"

namespace {

constexpr int kRounds = 5, kCallsPerRound = 6;

__global__ void compare(const T* a, const T* b, int64_t n, float* largest) {
  float most = 0;
  for (int64_t i = blockIdx.x * int64_t{256} + threadIdx.x; i < n; i += gridDim.x * int64_t{256}) {
    const float difference = fabsf(__bfloat162float(a[i]) - __bfloat162float(b[i]));
    most = difference <= most ? most : difference;  // a NaN stays
  }
  atomicMax(reinterpret_cast<int*>(largest), __float_as_int(fabsf(most)));
}

float difference(const T* a, const T* b, int64_t n) {
  float* largest;
  CHECK(cudaMallocManaged(&largest, sizeof(float)));
  *largest = 0;
  compare<<<1024, 256>>>(a, b, n, largest);
  CHECK(cudaDeviceSynchronize());
  const float result = *largest;
  CHECK(cudaFree(largest));
  return result;
}

struct Contender {
  std::string name;
  std::function<void()> call;
  std::function<float()> error;
  std::vector<double> times;
};

// With a pause before every measurement the card is cool and at its highest clock; without, large
// products take it to its power limit, where those that need less energy are the faster ones.
void race(const char* shape, double flops, std::vector<Contender>& contenders,
          std::chrono::milliseconds pause = {}) {
  cudaEvent_t start, end;
  CHECK(cudaEventCreate(&start));
  CHECK(cudaEventCreate(&end));
  for (Contender& c : contenders) {
    c.call();
    CHECK(cudaDeviceSynchronize());
  }
  std::vector<float> errors;
  for (Contender& c : contenders) {
    c.call();
    errors.push_back(c.error());
  }
  for (int round = 0; round < kRounds; ++round) {
    for (Contender& c : contenders) {
      CHECK(cudaDeviceSynchronize());
      std::this_thread::sleep_for(pause);
      c.call();
      CHECK(cudaEventRecord(start));
      for (int i = 0; i < kCallsPerRound; ++i) c.call();
      CHECK(cudaEventRecord(end));
      CHECK(cudaEventSynchronize(end));
      float ms;
      CHECK(cudaEventElapsedTime(&ms, start, end));
      c.times.push_back(ms * 1e3 / kCallsPerRound);
    }
  }
  for (size_t i = 0; i < contenders.size(); ++i) {
    Contender& c = contenders[i];
    std::sort(c.times.begin(), c.times.end());
    const double us = c.times[kRounds / 2];
    std::printf("%-28s %-34s %8.1f us (%7.1f-%7.1f) %6.1f TFLOP/s  difference %g\n", shape,
                c.name.c_str(), us, c.times.front(), c.times.back(), flops / us * 1e-6, errors[i]);
  }
  std::fflush(stdout);
}

// --- cuBLASLt: row-major D[m, n] = op(A) op(B), as D^T = B^T A^T of column-major matrices

struct Lt {
  cublasLtHandle_t handle;
  void* workspace;
  static constexpr size_t kWorkspace = 32 << 20;

  Lt() {
    CHECK(cublasLtCreate(&handle));
    CHECK(cudaMalloc(&workspace, kWorkspace));
  }
};

struct LtProduct {
  const Lt& lt;
  cublasLtMatmulDesc_t operation;
  cublasLtMatrixLayout_t a, b, d;
  const void *a_data, *b_data;
  void* d_data;
  std::vector<cublasLtMatmulHeuristicResult_t> choices;

  // Column-major: d[rows, columns] = a b, a transposed or not. `pitch`: of d, or 0 for `rows`.
  LtProduct(const Lt& lt, int64_t rows, int64_t columns, int64_t k, bool a_transposed,
            const void* a_data, bool b_transposed, const void* b_data, void* d_data,
            cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT, const void* bias = nullptr,
            int64_t pitch = 0)
      : lt(lt), a_data(a_data), b_data(b_data), d_data(d_data), choices(8) {
    CHECK(cublasLtMatmulDescCreate(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    auto set = [&](cublasLtMatmulDescAttributes_t attribute, const auto& value) {
      CHECK(cublasLtMatmulDescSetAttribute(operation, attribute, &value, sizeof(value)));
    };
    set(CUBLASLT_MATMUL_DESC_TRANSA, a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_TRANSB, b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue);
    if (bias != nullptr) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
    auto layout = [](cublasLtMatrixLayout_t* layout, int64_t r, int64_t c, int64_t pitch) {
      CHECK(cublasLtMatrixLayoutCreate(layout, CUDA_R_16BF, r, c, pitch));
    };
    a_transposed ? layout(&a, k, rows, k) : layout(&a, rows, k, rows);
    b_transposed ? layout(&b, columns, k, columns) : layout(&b, k, columns, k);
    layout(&d, rows, columns, pitch > 0 ? pitch : rows);
    cublasLtMatmulPreference_t preference;
    CHECK(cublasLtMatmulPreferenceCreate(&preference));
    const size_t workspace = Lt::kWorkspace;
    CHECK(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                               &workspace, sizeof(workspace)));
    int found = 0;
    CHECK(cublasLtMatmulAlgoGetHeuristic(lt.handle, operation, a, b, d, d, preference, 8,
                                         choices.data(), &found));
    choices.resize(found);
  }

  void run(size_t choice) const {
    const float one = 1, zero = 0;
    CHECK(cublasLtMatmul(lt.handle, operation, &one, a_data, a, b_data, b, &zero, d_data, d, d_data,
                         d, &choices[choice].algo, lt.workspace, Lt::kWorkspace, nullptr));
  }

  size_t best() const {
    cudaEvent_t start, end;
    CHECK(cudaEventCreate(&start));
    CHECK(cudaEventCreate(&end));
    size_t best = 0;
    float least = 1e30f;
    for (size_t i = 0; i < choices.size(); ++i) {
      run(i);
      CHECK(cudaEventRecord(start));
      for (int call = 0; call < kCallsPerRound; ++call) run(i);
      CHECK(cudaEventRecord(end));
      CHECK(cudaEventSynchronize(end));
      float ms;
      CHECK(cudaEventElapsedTime(&ms, start, end));
      if (ms < least) least = ms, best = i;
    }
    return best;
  }
};

}  // namespace
