// Everything the bindings share: the one place that talks to torch's stable C interface.
//
// The hot calls use the C functions directly (sizes and strides by pointer, allocation without the
// dispatcher): on a small tensor the call is all there is, and torch::stable's conveniences cost a
// microsecond each.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "../kernels/common/dtype.h"
#include "../kernels/common/launch.h"

#ifndef FUSEDCUDA_ARCHS
#define FUSEDCUDA_ARCHS "unknown"
#endif

namespace fusedcuda {

using torch::stable::Tensor;

// Text is built without iostreams: where the linker takes libstdc++ from an archive, as some Ubuntu
// toolchains do for JIT-built libraries, a second copy of the stream locale lives beside torch's
// and printing a number crashes.
inline std::string text(const std::string& part) { return part; }
inline std::string text(const char* part) { return part; }
template <typename Number, typename = std::enable_if_t<std::is_integral_v<Number>>>
std::string text(Number part) {
  return std::to_string(part);
}

template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::string result;
  ((result += text(parts)), ...);
  return result;
}

// Throws std::runtime_error, which reaches Python as a RuntimeError with this message and nothing
// else in it.
template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw std::runtime_error(concat(parts...));
}

inline void check_shim(AOTITorchError status, const char* what) {
  if (status != AOTI_TORCH_SUCCESS)
    fail("fusedcuda: torch refused ", what, "; its message is on stderr");
}

// A tensor's metadata, borrowed for the length of a call.
struct View {
  AtenTensorHandle handle;
  void* data;
  const int64_t* sizes;
  const int64_t* strides;
  int64_t dim;
  int32_t dtype;
  int32_t device_type;
  int32_t device_index;

  explicit View(const Tensor& tensor) : handle(tensor.get()) {
    int64_t* mutable_sizes;
    int64_t* mutable_strides;
    check_shim(aoti_torch_get_data_ptr(handle, &data), "a data pointer");
    check_shim(aoti_torch_get_sizes(handle, &mutable_sizes), "a tensor's sizes");
    check_shim(aoti_torch_get_strides(handle, &mutable_strides), "a tensor's strides");
    check_shim(aoti_torch_get_dim(handle, &dim), "a tensor's rank");
    check_shim(aoti_torch_get_dtype(handle, &dtype), "a tensor's dtype");
    check_shim(aoti_torch_get_device_type(handle, &device_type), "a tensor's device");
    check_shim(aoti_torch_get_device_index(handle, &device_index), "a tensor's device");
    sizes = mutable_sizes;
    strides = mutable_strides;
  }

  bool on_cpu() const { return device_type == aoti_torch_device_type_cpu(); }
  // A 0-d CPU tensor goes with tensors of any device: its value travels in the launch parameters.
  bool is_number() const { return dim == 0 && on_cpu(); }

  // As torch has it: a tensor without elements is.
  bool is_contiguous() const {
    bool matches = true;
    int64_t stride = 1;
    for (int64_t d = dim - 1; d >= 0; --d) {
      matches = matches && (sizes[d] == 1 || strides[d] == stride);
      stride *= sizes[d];
    }
    return matches || stride == 0;
  }
};

// "2, 3" for any callable that gives the elements' text.
template <typename Element>
std::string join(int64_t count, Element element) {
  std::string result;
  for (int64_t i = 0; i < count; ++i) result += concat(i ? ", " : "", element(i));
  return result;
}

inline std::string shape_string(const int64_t* sizes, int64_t dim) {
  return concat("(", join(dim, [&](int64_t d) { return sizes[d]; }), dim == 1 ? ",)" : ")");
}

inline std::optional<DType> dtype_of(const View& view) {
  if (view.dtype == aoti_torch_dtype_bfloat16()) return DType::kBFloat16;
  if (view.dtype == aoti_torch_dtype_float16()) return DType::kFloat16;
  if (view.dtype == aoti_torch_dtype_float32()) return DType::kFloat32;
  if (view.dtype == aoti_torch_dtype_float64()) return DType::kFloat64;
  return std::nullopt;
}

inline int32_t torch_dtype(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return aoti_torch_dtype_bfloat16();
    case DType::kFloat16:
      return aoti_torch_dtype_float16();
    case DType::kFloat32:
      return aoti_torch_dtype_float32();
    default:
      return aoti_torch_dtype_float64();
  }
}

// The value of a 0-d CPU tensor.
inline double number_of(const View& view) {
  switch (dtype_of(view).value_or(DType::kFloat64)) {
    case DType::kBFloat16:
      return static_cast<float>(*static_cast<const c10::BFloat16*>(view.data));
    case DType::kFloat16:
      return static_cast<float>(*static_cast<const c10::Half*>(view.data));
    case DType::kFloat32:
      return *static_cast<const float*>(view.data);
    default:
      return *static_cast<const double*>(view.data);
  }
}

inline Tensor empty_strided(const int64_t* sizes, const int64_t* strides, int64_t dim,
                            int32_t dtype, int32_t device_type, int32_t device_index) {
  AtenTensorHandle handle;
  check_shim(
      aoti_torch_empty_strided(dim, sizes, strides, dtype, device_type, device_index, &handle),
      "an allocation");
  return Tensor(handle);
}

inline Tensor empty_contiguous(const int64_t* sizes, int64_t dim, int32_t dtype,
                               int32_t device_type, int32_t device_index) {
  int64_t strides[64];
  int64_t stride = 1;
  for (int64_t d = dim - 1; d >= 0; --d) {
    strides[d] = stride;
    stride *= sizes[d] > 0 ? sizes[d] : 1;
  }
  return empty_strided(sizes, strides, dim, dtype, device_type, device_index);
}

// torch.empty_like, which keeps the strides of a contiguous tensor and densifies others.
inline Tensor empty_like(const Tensor& tensor, const View& view) {
  if (!view.is_contiguous()) return torch::stable::empty_like(tensor);
  return empty_strided(view.sizes, view.strides, view.dim, view.dtype, view.device_type,
                       view.device_index);
}

// An operator of torch, by the dispatcher, which takes tensors, integers, types and options of
// those, but no Scalar.
template <typename... Arguments>
Tensor call_torch(const char* op, const char* overload, const Arguments&... arguments) {
  std::array<StableIValue, sizeof...(Arguments)> stack{torch::stable::detail::from(arguments)...};
  check_shim(torch_call_dispatcher(op, overload, stack.data(), TORCH_ABI_VERSION), op);
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// Makes `index` the current device for a scope; free of charge when it already is.
class __attribute__((visibility("hidden"))) DeviceScope {
 public:
  explicit DeviceScope(int32_t index) {
    int32_t current;
    check_shim(aoti_torch_get_current_device_index(&current), "the current device");
    if (current != index) guard_.emplace(index);
  }

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};

inline cudaStream_t current_stream(int32_t device_index) {
  void* stream = nullptr;
  check_shim(aoti_torch_get_current_cuda_stream(device_index, &stream), "the current stream");
  return static_cast<cudaStream_t>(stream);
}

inline void throw_on_error(cudaError_t status, const char* op) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // torch shares the runtime and would blame its own next launch
  if (status == cudaErrorNoKernelImageForDevice) {
    int device = 0, major = 0, minor = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    fail(op, ": fusedcuda was built for ", FUSEDCUDA_ARCHS, ", and this GPU is ", major, ".", minor,
         "; reinstall with TORCH_CUDA_ARCH_LIST=", major, ".", minor,
         " pip install --force-reinstall --no-cache-dir .");
  }
  fail(op, ": CUDA error: ", cudaGetErrorString(status));
}

// Whether an environment variable is set to something other than 0.
inline bool environment_flag(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' && *value != '0';
}

// Prints what describe() says of a launch, where that is asked for; it is not called otherwise.
template <typename Describe>
void print_config(const Describe& describe) {
  static const bool prints = environment_flag("FUSEDCUDA_PRINT_CONFIG");
  if (prints) std::fprintf(stderr, "fusedcuda: %s\n", describe().c_str());
}

// What the choosers want to know about a device, asked for once. `kQuery` asks the current one.
template <cudaError_t (*kQuery)(DeviceTraits*)>
const DeviceTraits& device_traits(int32_t device_index) {
  constexpr int kMaxDevices = 64;
  static std::once_flag asked[kMaxDevices];
  static DeviceTraits traits[kMaxDevices];
  if (device_index < 0 || device_index >= kMaxDevices)
    fail("fusedcuda: device index ", device_index, " is not supported");
  std::call_once(asked[device_index], [&] {
    const DeviceScope scope(device_index);
    throw_on_error(kQuery(&traits[device_index]), "fusedcuda");
  });
  return traits[device_index];
}

// What a plan is made for: the current device, or with `num_sms` an H200 of so many
// multiprocessors.
template <cudaError_t (*kQuery)(DeviceTraits*)>
DeviceTraits planned_device(int64_t num_sms) {
  DeviceTraits traits;
  if (num_sms > 0) {
    traits.num_sms = static_cast<int>(num_sms);
  } else {
    int32_t current;
    check_shim(aoti_torch_get_current_device_index(&current), "the current device");
    traits = device_traits<kQuery>(current);
  }
  return traits;
}

}  // namespace fusedcuda
