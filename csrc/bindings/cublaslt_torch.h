// cuBLASLt with torch's handle, torch's TF32 setting and memory from torch's allocator.
#pragma once

#include <cublas_api.h>
#include <torch/csrc/stable/c/shim.h>

#include <mutex>
#include <optional>
#include <vector>

#include "cublaslt_library.h"
#include "shim.h"

namespace fusedcuda {

// --- Handle

// torch's handle for this thread and the current device: a cuBLAS handle is one of cuBLASLt too.
// Asking sets it up, for the current stream and with torch's present settings.
inline void* current_cublas_handle() {
  void* handle = nullptr;
  check_shim(torch_get_current_cuda_blas_handle(&handle), "the cuBLAS handle");
  return handle;
}

// The same without setting it up, which products of cuBLASLt do not need: half a microsecond less.
// torch gives a thread one handle a device for as long as the thread lives.
inline cublasLtHandle_t cublaslt_handle(int32_t device_index) {
  constexpr int kMaxDevices = 64;
  thread_local void* handles[kMaxDevices] = {};
  if (device_index >= kMaxDevices)
    fail("fusedcuda: device index ", device_index, " is not supported");
  void*& handle = handles[device_index];
  if (handle == nullptr) handle = current_cublas_handle();
  return static_cast<cublasLtHandle_t>(handle);
}

// Whether torch lets float32 products run in TF32: torch.backends.cuda.matmul.allow_tf32 and its
// newer names. The stable interface has no function for that, but torch writes the answer into the
// handle each time that it hands it out.
inline bool torch_allows_tf32() {
  static decltype(&cublasGetMathMode) get_math_mode = [] {
    decltype(&cublasGetMathMode) function;
    SharedLibrary(kCublasSoname).find("cublasGetMathMode", &function);
    return function;
  }();
  cublasMath_t mode;
  check_cublaslt(get_math_mode(static_cast<cublasHandle_t>(current_cublas_handle()), &mode),
                 "to tell its math mode");
  return (mode & 0xf) == CUBLAS_TF32_TENSOR_OP_MATH;
}

// --- Workspaces

// One a stream and device, which serves all products on that stream in turn. A captured graph
// replays with the address that it was captured with, also after this process has captured others
// or was told to empty its caches: while a capture is on, every product gets memory of the graph's
// own pool.
class Workspaces {
 public:
  // `temporary` keeps the memory for the length of the call where it is not kept here.
  void* get(int32_t device, cudaStream_t stream, size_t bytes, size_t limit,
            std::optional<Tensor>* temporary) {
    cudaStreamCaptureStatus capture;
    throw_on_error(cudaStreamIsCapturing(stream, &capture), "fusedcuda");
    auto allocate_temporary = [&] {
      return View(temporary->emplace(allocate(device, bytes))).data;
    };
    if (capture != cudaStreamCaptureStatusNone) return allocate_temporary();
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const Workspace& workspace : workspaces_) {
      if (workspace.device == device && workspace.stream == stream) return workspace.data;
    }
    // Streams that come and go must not hold more and more memory.
    if (workspaces_.size() >= kMostStreams) return allocate_temporary();
    Tensor memory = allocate(device, limit);
    void* data = View(memory).data;
    workspaces_.push_back({device, stream, data, std::move(memory)});
    return data;
  }

 private:
  static constexpr size_t kMostStreams = 64;

  struct Workspace {
    int32_t device;
    cudaStream_t stream;
    void* data;
    Tensor memory;
  };

  static Tensor allocate(int32_t device, size_t bytes) {
    const int64_t size = static_cast<int64_t>(bytes);
    return empty_contiguous(&size, 1, aoti_torch_dtype_uint8(), aoti_torch_device_type_cuda(),
                            device);
  }

  std::mutex mutex_;
  std::vector<Workspace> workspaces_;
};

// Never destroyed: at the end of the process torch's allocator goes first.
inline Workspaces& workspaces() {
  static auto* const all = new Workspaces;
  return *all;
}

}  // namespace fusedcuda
