// The steps of a forward and of a backward (see linear_act_steps.h).
#pragma once

#include "linear_act_steps.h"

namespace fusedcuda {

// --- Our own products

// Whether they are to be had and taken.
template <typename Params>
bool takes_hopper(const Params& params, const PlanSource& source) {
  if (source.backend == LinearBackend::kCublasLt || !hopper_can_run(params, source.device))
    return false;
  return source.backend == LinearBackend::kHopper || hopper_is_faster(params, source.device);
}

// An address that nobody reads, for memory that is not allocated yet and will be aligned as well.
inline void* const kSomewhere = reinterpret_cast<void*>(uintptr_t{1} << 12);

inline const char* const kWhyPadded = "rows do not start at multiples of 16 bytes";

// A factor as the copy engine can read it: where it is, or, if there is room for one, a copy with
// padded rows.
inline GemmFactor readable(const GemmFactor& factor, int64_t rows, int64_t k, DType dtype,
                           void* room) {
  GemmFactor result = factor;
  result.stride =
      factor.k_is_inner ? line_stride(factor.stride, rows, k) : line_stride(factor.stride, k, rows);
  const bool fits = gemm::can_be_boxed(factor.data, result.stride, dtype);
  if (fits || room == nullptr || !factor.k_is_inner) return result;
  return {room, padded_columns(k), true};
}

// The step that makes a copy, where one is read.
inline void pad_if_copied(const char* what, const GemmFactor& from, const void* read, int64_t rows,
                          int64_t k, void* room, StepPlanner& planner) {
  if (room == nullptr || read != room) return;
  const GemmMatrix matrix = {const_cast<void*>(from.data), from.stride};
  planner.pad_rows(what, {rows, k, padded_columns(k), matrix, room}, kWhyPadded);
}

// --- Forward

// What our own product is asked for. It has no batches and adds no residual.
inline LinearActParams hopper_params(const LinearForward& f) {
  const LinearLayer& layer = f.layer;
  LinearActParams params;
  params.dtype = layer.dtype;
  params.activation = f.activation;
  params.m = layer.m;
  params.n = layer.n;
  params.k = layer.k;
  params.a = readable(f.x.matrix, layer.m, layer.k, layer.dtype, f.padded_x);
  params.b = readable(f.weight.matrix, layer.n, layer.k, layer.dtype, f.padded_weight);
  params.bias = f.bias;
  params.output = {f.output.data, line_stride(f.output.stride, layer.m, layer.n)};
  params.saves = f.saves;
  params.saved = f.saved;
  return params;
}

// Whether the product for few inputs is to be had and taken, of operands where they are.
inline bool takes_narrow(const LinearForward& f, const PlanSource& source) {
  // First what tells most layers apart, as every call asks.
  if (f.layer.k > kNarrowMostK || source.backend != LinearBackend::kMeasured) return false;
  LinearForward as_given = f;
  as_given.padded_x = as_given.padded_weight = nullptr;
  return f.layer.batch == 1 && f.residual.data == nullptr &&
         narrow_can_run(hopper_params(as_given));
}

inline bool takes_hopper(const LinearForward& f, const PlanSource& source) {
  return f.layer.batch == 1 && f.residual.data == nullptr && !takes_narrow(f, source) &&
         takes_hopper(hopper_params(f), source);
}

inline bool try_narrow(const LinearForward& f, StepPlanner& planner) {
  if (!takes_narrow(f, planner.source())) return false;
  planner.narrow("y", hopper_params(f));
  return true;
}

inline bool try_hopper(const LinearForward& f, StepPlanner& planner) {
  if (!takes_hopper(f, planner.source())) return false;
  const LinearActParams params = hopper_params(f);
  const LinearLayer& layer = f.layer;
  pad_if_copied("x", f.x.matrix, params.a.data, layer.m, layer.k, f.padded_x, planner);
  pad_if_copied("weight", f.weight.matrix, params.b.data, layer.n, layer.k, f.padded_weight,
                planner);
  planner.hopper("y", params);
  return true;
}

// The epilogue that makes y and keeps what is to be saved; nothing, and why, if there is none.
inline std::optional<cublasLtEpilogue_t> fused_epilogue(Activation activation, bool has_bias,
                                                        SavedForBackward saves, const char** why) {
  switch (saves) {
    case SavedForBackward::kMask:
      // Its bits say z >= 0 (measured on an H200): set where z is 0, not set where it is NaN.
      *why = "cuBLASLt's mask lets the gradient pass where a ReLU's input is 0";
      return std::nullopt;
    case SavedForBackward::kDerivative:
      *why = "cuBLASLt has no epilogue that keeps the derivative";
      return std::nullopt;
    default:
      *why = "cuBLASLt has no epilogue for this activation";
      return forward_epilogue(activation, has_bias, saves != SavedForBackward::kNone);
  }
}

inline ActRowsParams act_of_z(const LinearForward& f, const LinearMatrix& z) {
  ActRowsParams rows;
  rows.dtype = f.layer.dtype;
  rows.activation = f.activation;
  rows.m = f.layer.batch * f.layer.m;
  rows.n = f.layer.n;
  rows.input = {z.data, f.layer.n};
  rows.output = {f.output.data, f.layer.n};
  return rows;
}

inline Steps plan_forward(const LinearForward& f, const PlanSource& source) {
  StepPlanner planner(source);
  if (try_narrow(f, planner) || try_hopper(f, planner)) return planner.take();

  const LinearLayer& layer = f.layer;
  void* const bias = planner.aligned_bias(f);
  Matmul matmul = product(layer, layer.m, layer.n, layer.k, f.x, f.weight, f.output);
  add_c(matmul, f.residual);
  add_bias(matmul, bias, f.bias_batch);
  matmul.problem.epilogue = *forward_epilogue(Activation::kNone, bias != nullptr, false);
  if (f.activation == Activation::kNone) {
    planner.matmul("y", matmul);
    return planner.take();
  }

  const char* why;
  if (const auto epilogue = fused_epilogue(f.activation, bias != nullptr, f.saves, &why)) {
    Matmul fused = matmul;
    fused.problem.epilogue = *epilogue;
    if (f.saved != nullptr) add_aux(fused, f.saved);
    if (planner.try_matmul("y", fused, &why) != nullptr) return planner.take();
  }

  // z, where the elements that are saved go; then the activation.
  const bool saves_elements =
      f.saves == SavedForBackward::kPreActivation || f.saves == SavedForBackward::kDerivative;
  const LinearMatrix z = saves_elements ? contiguous_matrix(f.saved, layer.m, layer.n) : f.output;
  matmul.operands.output = z.data;
  matmul.problem.output_alignment = alignment_of(z.data);
  planner.matmul("z", matmul);
  ActRowsParams rows = act_of_z(f, z);
  if (f.saves != SavedForBackward::kPreActivation) {
    rows.saves = f.saves;
    rows.saved = f.saved;
  }
  planner.act_rows("y", rows, why);
  return planner.take();
}

// --- Backward

inline ColumnSumsParams sums_of(const LinearLayer& layer, const LinearMatrix& dy, void* dbias) {
  ColumnSumsParams sums;
  sums.rows.dtype = layer.dtype;
  sums.rows.backward = true;
  sums.rows.m = layer.batch * layer.m;
  sums.rows.n = layer.n;
  sums.rows.input = {dy.data, dy.stride};
  sums.batch = layer.batch;
  sums.sums = dbias;
  return sums;
}

// dweight = dz.T x with the sum of dz's columns in its epilogue, or that sum apart.
inline void plan_weight_gradients(const LinearBackward& b, const LinearMatrix& dz, void* dbias,
                                  const char* dweight_name, const char* dbias_name,
                                  StepPlanner& planner) {
  const LinearLayer& layer = b.layer;
  const ColumnSumsParams sums = sums_of(layer, dz, dbias);
  if (b.dweight == nullptr) {
    const char* why = "no product reads dz along its columns";
    if (dbias != nullptr) planner.column_sums(dbias_name, sums, why);
    return;
  }
  Matmul matmul = product(layer, layer.n, layer.k, layer.m, transposed(as_factor(dz)),
                          transposed(b.x), contiguous_matrix(b.dweight, layer.n, layer.k));
  if (dbias != nullptr) {
    Matmul fused = matmul;
    fused.problem.epilogue = CUBLASLT_EPILOGUE_BGRADB;
    add_bias(fused, dbias, layer.n);
    const char* why;
    if (planner.try_matmul(dweight_name, fused, &why) != nullptr) return;
    planner.column_sums(dbias_name, sums, why);
  }
  planner.matmul(dweight_name, matmul);
}

inline void plan_dx(const LinearBackward& b, const LinearMatrix& dz, StepPlanner& planner) {
  if (b.dx == nullptr) return;
  const LinearLayer& layer = b.layer;
  planner.matmul("dx", product(layer, layer.m, layer.k, layer.n, as_factor(dz),
                               transposed(b.weight), contiguous_matrix(b.dx, layer.m, layer.k)));
}

inline ActRowsParams act_gradient(const LinearBackward& b, const LinearMatrix& dy) {
  ActRowsParams rows;
  rows.dtype = b.layer.dtype;
  rows.activation = b.activation;
  rows.m = b.layer.batch * b.layer.m;
  rows.n = b.layer.n;
  rows.backward = true;
  rows.input = {dy.data, dy.stride};
  rows.saves = b.saves;
  rows.saved = b.saved;
  // The sum of dz needs none in memory.
  if (b.dx != nullptr || b.dweight != nullptr) rows.output = {b.dz.data, b.dz.stride};
  return rows;
}

// How a step is called by what it makes.
struct ActGradientNames {
  const char *dz, *both, *dbias;
};

// dz = dy * act'(z), and in the same pass the sums of its columns. An epilogue that adds them up is
// not asked for: it would read dz as well, and on Hopper is a kernel of its own.
inline void plan_act_gradient(const LinearBackward& b, const LinearMatrix& dy,
                              const ActGradientNames& names, const char* why,
                              StepPlanner& planner) {
  const ActRowsParams rows = act_gradient(b, dy);
  const bool keeps_dz = rows.output.data != nullptr;
  if (b.dbias != nullptr) {
    ColumnSumsParams sums = sums_of(b.layer, dy, b.dbias);
    sums.rows = rows;
    planner.column_sums(keeps_dz ? names.both : names.dbias, sums, why);
  } else if (keeps_dz) {
    planner.act_rows(names.dz, rows, why);
  }
}

// Our own products take rows of x and of the weight, and a ReLU's mask.
inline LinearActBwdParams hopper_params(const LinearBackward& b) {
  const LinearLayer& layer = b.layer;
  auto matrix = [&](const LinearFactor& factor, int64_t rows, void* room) -> GemmMatrix {
    const GemmFactor read = readable(factor.matrix, rows, layer.k, layer.dtype, room);
    return {const_cast<void*>(read.data), read.stride};
  };
  LinearActBwdParams params;
  params.dtype = layer.dtype;
  params.m = layer.m;
  params.n = layer.n;
  params.k = layer.k;
  params.dy = {b.dy.data, line_stride(b.dy.stride, layer.m, layer.n)};
  params.mask = b.saved;
  if (b.dweight != nullptr) params.x = matrix(b.x, layer.m, b.padded_x);
  if (b.dx != nullptr) {
    params.weight = matrix(b.weight, layer.n, b.padded_weight);
    params.dx = {b.dx, line_stride(layer.k, layer.m, layer.k)};
    const bool fits = gemm::can_be_boxed(b.dx, params.dx.stride, layer.dtype);
    if (!fits && b.padded_dx != nullptr) params.dx = {b.padded_dx, padded_columns(layer.k)};
  }
  params.dweight = b.dweight;
  params.dbias = b.dbias;
  return params;
}

inline bool takes_hopper(const LinearBackward& b, const PlanSource& source) {
  const bool has_rows = (b.dweight == nullptr || b.x.matrix.k_is_inner) &&
                        (b.dx == nullptr || b.weight.matrix.k_is_inner);
  return b.saves == SavedForBackward::kMask && b.layer.batch == 1 && has_rows &&
         (b.dx != nullptr || b.dweight != nullptr) && takes_hopper(hopper_params(b), source);
}

inline bool try_hopper(const LinearBackward& b, const char* what, StepPlanner& planner) {
  if (!takes_hopper(b, planner.source())) return false;
  const LinearActBwdParams params = hopper_params(b);
  const LinearLayer& layer = b.layer;
  pad_if_copied("x", b.x.matrix, params.x.data, layer.m, layer.k, b.padded_x, planner);
  pad_if_copied("weight", b.weight.matrix, params.weight.data, layer.n, layer.k, b.padded_weight,
                planner);
  planner.hopper(what, params);
  if (params.dx.data != nullptr && params.dx.data == b.padded_dx)
    planner.pad_rows("dx", {layer.m, layer.k, layer.k, params.dx, b.dx}, kWhyPadded);
  return true;
}

// The gradient of a layer of one output as our own kernel takes it.
inline OneOutputBwdParams one_output_params(const LinearBackward& b) {
  const LinearLayer& layer = b.layer;
  const int bytes = size_of(layer.dtype);
  OneOutputBwdParams params;
  params.dtype = layer.dtype;
  params.rows = layer.m;
  params.columns = static_cast<int>(layer.k);
  params.dy = {b.dy.data, b.dy.stride};
  params.saves = b.saves;
  params.saved = b.saved;
  if (b.dweight != nullptr) {
    const int64_t stride = line_stride(b.x.matrix.stride, layer.m, layer.k);
    params.x = RowMatrix::make(const_cast<void*>(b.x.matrix.data), stride, layer.m, layer.k, bytes);
  }
  if (b.dx != nullptr) {
    params.weight = b.weight.matrix.data;
    params.weight_step = b.weight.matrix.k_is_inner ? 1 : b.weight.matrix.stride;
    params.dx = RowMatrix::make(b.dx, layer.k, layer.m, layer.k, bytes);
  }
  params.dweight = b.dweight;
  params.dbias = b.dbias;
  return params;
}

// Whether that kernel is to be had and taken.
inline bool takes_one_output(const LinearBackward& b, const PlanSource& source) {
  constexpr int64_t kMostK = int64_t{1} << 30;
  const LinearLayer& layer = b.layer;
  // First what tells most layers apart, as every call asks.
  if (layer.n != 1 || source.backend != LinearBackend::kMeasured) return false;
  const bool has_rows = b.dweight == nullptr || b.x.matrix.k_is_inner;
  return layer.batch == 1 && layer.k < kMostK && has_rows &&
         one_output_can_run(one_output_params(b));
}

inline bool try_one_output(const LinearBackward& b, const char* what, StepPlanner& planner) {
  if (!takes_one_output(b, planner.source())) return false;
  planner.one_output_bwd(what, one_output_params(b));
  return true;
}

inline Steps plan_backward(const LinearBackward& b, const PlanSource& source) {
  StepPlanner planner(source);
  constexpr const char* kAll = "dx, dweight, dbias";
  if (try_one_output(b, kAll, planner) || try_hopper(b, kAll, planner)) return planner.take();
  if (b.activation == Activation::kNone) {
    plan_weight_gradients(b, b.dy, b.dbias, "dweight", "dbias", planner);
    plan_dx(b, b.dy, planner);
    return planner.take();
  }
  plan_act_gradient(b, b.dy, {"dz", "dz, dbias", "dbias"}, nullptr, planner);
  plan_weight_gradients(b, b.dz, nullptr, "dweight", "dbias", planner);
  plan_dx(b, b.dz, planner);
  return planner.take();
}

inline Steps plan_mlp_backward(const MlpBackward& mlp, const PlanSource& source) {
  StepPlanner planner(source);
  const LinearBackward& first = mlp.first;
  const LinearLayer& layer = first.layer;

  LinearBackward second;
  second.layer = layer;
  second.layer.n = mlp.out_features;
  second.layer.k = layer.n;
  second.dy = mlp.dy;
  second.x = mlp.h;
  second.dweight = mlp.dw2;
  second.dbias = mlp.db2;
  if (!try_one_output(second, "dw2, db2", planner))
    plan_weight_gradients(second, mlp.dy, mlp.db2, "dw2", "db2", planner);

  void* db1 = first.dbias;
  if (first.dx == nullptr && first.dweight == nullptr && db1 == nullptr) return planner.take();
  // dz = (dy w2) * act'(z), and the sum of its columns is db1.
  Matmul matmul = product(layer, layer.m, layer.n, mlp.out_features, as_factor(mlp.dy),
                          transposed(mlp.w2), first.dz);
  const char* why = nullptr;
  bool fused = false;
  auto try_fused = [&](bool sums) {
    const auto epilogue = backward_epilogue(first.activation, sums);
    why = "cuBLASLt has no epilogue for this activation";
    if (!epilogue || first.saves == SavedForBackward::kDerivative) return false;
    Matmul candidate = matmul;
    candidate.problem.epilogue = *epilogue;
    add_aux(candidate, first.saved);
    if (sums) add_bias(candidate, db1, layer.n);
    return planner.try_matmul("dz1", candidate, &why) != nullptr;
  };
  if (first.activation != Activation::kNone) {
    fused = db1 != nullptr && try_fused(true);
    if (fused) db1 = nullptr;  // is made
    if (!fused) fused = try_fused(false);
  }
  if (!fused) {
    planner.matmul("dh", matmul);
    if (try_hopper(first, "dx, dw1, db1", planner)) return planner.take();
    if (first.activation != Activation::kNone) {
      plan_act_gradient(first, first.dz, {"dz1", "dz1, db1", "db1"}, why, planner);
      db1 = nullptr;
    }
  }
  plan_weight_gradients(first, first.dz, db1, "dw1", "db1", planner);
  plan_dx(first, first.dz, planner);
  return planner.take();
}

}  // namespace fusedcuda
