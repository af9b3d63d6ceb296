// What a linear layer and its gradient compute, as plain data: matrices, factors and sizes. How is
// decided in linear_act_plan.h. No torch here.
#pragma once

#include "../kernels/linear_act.h"

namespace fusedcuda {

// `batch` matrices whose elements of a row are neighbours.
struct LinearMatrix {
  void* data = nullptr;
  int64_t stride = 0, batch_stride = 0;
};

struct LinearFactor {
  GemmFactor matrix;
  int64_t batch_stride = 0;
};

// The same memory as a factor whose rows and k have changed places.
inline LinearFactor transposed(LinearFactor factor) {
  factor.matrix.k_is_inner = !factor.matrix.k_is_inner;
  return factor;
}

inline LinearFactor as_factor(const LinearMatrix& matrix) {
  return {{matrix.data, matrix.stride, true}, matrix.batch_stride};
}

// x (m x k) and weight (n x k), `batch` times.
struct LinearLayer {
  DType dtype = DType::kBFloat16;
  int64_t batch = 1, m = 0, n = 0, k = 0;
  bool allows_tf32 = false;
  bool low_precision_reduction = false;
  int32_t device = 0;
};

// What the forward of a layer saves: what our own products of the gradient take, and in wider
// types, for which there are none, what cuBLASLt's epilogues do.
inline SavedForBackward saved_for_backward(Activation activation, DType dtype) {
  if (activation == Activation::kNone) return SavedForBackward::kNone;
  if (activation == Activation::kRelu) return SavedForBackward::kMask;
  return size_of(dtype) == 2 ? SavedForBackward::kDerivative : SavedForBackward::kPreActivation;
}

// y = act(x weight.T + bias + residual). Outputs are contiguous.
struct LinearForward {
  LinearLayer layer;
  Activation activation = Activation::kNone;
  LinearFactor x, weight;
  void* bias = nullptr;
  int64_t bias_batch = 0;
  void* aligned_bias = nullptr;  // as many elements, for a copy of a bias that is not aligned
  LinearMatrix residual, output;
  void* padded_x = nullptr;  // room for copies with padded rows, or null
  void* padded_weight = nullptr;
  SavedForBackward saves = SavedForBackward::kNone;  // kNone: no gradient is needed
  void* saved = nullptr;
};

// The gradients of a layer; those that are null are not wanted. dz has room for dy * act'(z), and
// is dy itself where there is no activation.
struct LinearBackward {
  LinearLayer layer;
  Activation activation = Activation::kNone;
  LinearMatrix dy, dz;
  LinearFactor x, weight;
  SavedForBackward saves = SavedForBackward::kNone;
  void* saved = nullptr;
  void* dx = nullptr;
  void* dweight = nullptr;
  void* dbias = nullptr;
  void* padded_x = nullptr;  // room for copies with padded rows, or null
  void* padded_weight = nullptr;
  void* padded_dx = nullptr;
};

// The gradients of two layers, the second one without activation: h = act(z), y = h w2.T + b2.
struct MlpBackward {
  LinearBackward first;  // its dy is not given but made, and lies in its dz
  LinearMatrix dy;
  LinearFactor h, w2;
  int64_t out_features = 0;
  void* dw2 = nullptr;
  void* db2 = nullptr;
};

}  // namespace fusedcuda
