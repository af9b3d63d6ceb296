// Descriptions of matrices for Hopper's copy engine (TMA), made on the host.
//
// A box of 2-byte elements is copied to shared memory with rows of 128 bytes whose eight 16-byte
// chunks are permuted: chunk c of row r lies at position c ^ (r % 8). So neither rows nor columns
// of 8x8 elements meet in the same banks, and wgmma.cuh reads exactly this layout. A box of bytes
// has rows of 16 bytes as they are.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#ifndef FUSEDCUDA_EMULATION
#include <cuda.h>
#endif

namespace fusedcuda {

constexpr int kSwizzleBytes = 128;
constexpr int kByteBoxColumns = 16;

// What is beyond the matrix reads as zeros and is not written.
struct BoxedMatrix {
  void* data = nullptr;   // 16-byte aligned
  int element_bytes = 2;  // or 1
  int64_t rows = 0;       // below 2^32
  int64_t columns = 0;    // neighbours in memory; below 2^32
  int64_t stride = 0;     // elements between rows; a multiple of 16 bytes
  int box_rows = 0;       // at most 256

  int box_bytes() const { return element_bytes == 2 ? kSwizzleBytes : kByteBoxColumns; }
};

#ifdef FUSEDCUDA_EMULATION

struct alignas(64) TensorMap {
  BoxedMatrix matrix;
};

inline cudaError_t make_tensor_map(const BoxedMatrix& matrix, TensorMap* map) {
  if (reinterpret_cast<uintptr_t>(matrix.data) % 16 != 0 ||
      matrix.stride * matrix.element_bytes % 16 != 0 || matrix.box_rows > 256)
    return cudaErrorInvalidValue;
  map->matrix = matrix;
  return cudaSuccess;
}

#else

using TensorMap = CUtensorMap;

struct TensorMapEncoder {
  decltype(&cuTensorMapEncodeTiled) encode = nullptr;
  cudaError_t status = cudaSuccess;
};

// In the driver, through the runtime, so that nothing links to libcuda.
inline TensorMapEncoder find_tensor_map_encoder() {
  TensorMapEncoder encoder;
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  encoder.status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                                    cudaEnableDefault, &result);
  if (encoder.status == cudaSuccess && result != cudaDriverEntryPointSuccess)
    encoder.status = cudaErrorNotSupported;
  encoder.encode = reinterpret_cast<decltype(encoder.encode)>(found);
  return encoder;
}

inline cudaError_t make_tensor_map(const BoxedMatrix& matrix, TensorMap* map) {
  static const TensorMapEncoder encoder = find_tensor_map_encoder();
  if (encoder.status != cudaSuccess) return encoder.status;
  const bool is_bytes = matrix.element_bytes == 1;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(matrix.columns),
                              static_cast<cuuint64_t>(matrix.rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(matrix.stride) * matrix.element_bytes};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(matrix.box_bytes() / matrix.element_bytes),
                            static_cast<cuuint32_t>(matrix.box_rows)};
  const cuuint32_t steps[] = {1, 1};
  // The engine copies bits: bfloat16 and float16 are integers to it.
  auto encode = [&] {
    return encoder.encode(map,
                          is_bytes ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16,
                          2, matrix.data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                          is_bytes ? CU_TENSOR_MAP_SWIZZLE_NONE : CU_TENSOR_MAP_SWIZZLE_128B,
                          CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult encoded = encode();
  if (encoded != CUDA_SUCCESS) {
    // A thread whose first call of CUDA this is, as autograd's may be, has no context yet, and the
    // driver does not make the device's current.
    int device;
    cudaError_t status = cudaGetDevice(&device);
    if (status == cudaSuccess) status = cudaSetDevice(device);
    if (status != cudaSuccess) return status;
    encoded = encode();
  }
  return encoded == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

#endif

}  // namespace fusedcuda
