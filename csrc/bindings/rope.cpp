// The rope family for torch: checks, empty case, allocation, launch. Schemas and references are in
// fusedcuda/ops/rope.py.
#include "../kernels/rope.h"

#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "../kernels/rope_config.h"
#include "shim.h"

namespace fusedcuda {
namespace {

// --- One call

// The plan as JSON, for rope_plan and FUSEDCUDA_PRINT_CONFIG. `converted`: whether the tables were.
std::string describe(const char* name, const RopeParams& params, const RopePlan& plan,
                     bool converted) {
  const char* path = plan.blocks == 0 ? "empty" : plan.vec > 1 ? "vector" : "scalar";
  return concat(
      "{\"op\": \"", name, "\", \"path\": \"", path, "\", \"vec\": ", plan.vec,
      ", \"threads\": ", plan.threads_x * plan.threads_y * plan.threads_z, ", \"blocks\": [",
      plan.blocks, ", ", plan.column_tiles, "], \"columns\": ", plan.columns, ", \"inside\": \"",
      plan.heads_inside ? "heads" : "positions", "\", \"tile\": {\"columns\": ", plan.threads_x,
      ", \"heads\": ", plan.tile_heads(), ", \"positions\": ", plan.tile_positions(),
      "}, \"heads\": ", params.num_heads(), ", \"heads_per_block\": ", plan.heads_per_block,
      ", \"copies\": [", converted ? "\"cos\", \"sin\"" : "", "]}");
}

// Checks of the operands, and the parameters that the launch takes.
class RopeCall {
 public:
  RopeCall(const char* name, const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin,
           bool interleaved, bool transposed)
      : name_(name), q_(q), k_(k) {
    check_vectors("q", q_);
    check_vectors("k", k_);
    for (int d : {0, 2, 3}) {
      if (k_.sizes[d] != q_.sizes[d]) {
        fail(name_, ": k must have q's shape except for the heads; got ", shape_of(k_), " beside ",
             shape_of(q_));
      }
    }
    params_.dtype = *dtype_of(q_);
    params_.batch = q_.sizes[0];
    params_.length = q_.sizes[2];
    params_.head_dim = q_.sizes[3];
    params_.interleaved = interleaved;
    params_.transposed = transposed;
    params_.q.heads = static_cast<int>(q_.sizes[1]);
    params_.k.heads = static_cast<int>(k_.sizes[1]);
    set_layout(q_, &params_.q.input);
    set_layout(k_, &params_.k.input);
    check_table("cos", View(cos));
    check_table("sin", View(sin));
    set_tables(cos, sin);
  }

  void set_outputs(const Tensor& q, const Tensor& k) {
    set_layout(View(q), &params_.q.output);
    set_layout(View(k), &params_.k.output);
  }

  // In place, every element must have memory of its own.
  void set_outputs_in_place() {
    for (const View* view : {&q_, &k_}) {
      for (int d = 0; d < 4; ++d) {
        if (view->sizes[d] > 1 && view->strides[d] == 0) {
          fail(name_, ": ", view == &q_ ? "q" : "k",
               " is expanded: several of its elements share memory; clone it, or use rope");
        }
      }
    }
    if (q_.data == k_.data && !params_.is_empty() && params_.q.heads > 0 && params_.k.heads > 0)
      fail(name_, ": q and k share memory; clone one of them, or use rope");
    params_.q.output = params_.q.input;
    params_.k.output = params_.k.input;
  }

  RopePlan plan(const DeviceTraits& device) const {
    const RopePlan plan = choose_rope_config(params_, device);
    print_config([&] { return describe_plan(plan); });
    return plan;
  }

  std::string describe_plan(const RopePlan& plan) const {
    return describe(name_, params_, plan, !converted_.empty());
  }

  void launch() const {
    if (params_.is_empty()) return;
    DeviceScope scope(q_.device_index);
    const RopePlan chosen = plan(device_traits<rope_device_traits>(q_.device_index));
    throw_on_error(launch_rope(params_, chosen, current_stream(q_.device_index)), name_);
  }

  const View& q() const { return q_; }
  const View& k() const { return k_; }

 private:
  static std::string shape_of(const View& view) { return shape_string(view.sizes, view.dim); }

  static void set_layout(const View& view, RopeLayout* layout) {
    layout->data = view.data;
    for (int d = 0; d < 4; ++d) layout->strides[d] = view.strides[d];
  }

  void check_device(const char* argument, const View& view) const {
    if (view.device_type != q_.device_type || view.device_index != q_.device_index)
      fail(name_, ": ", argument, " is on another device than q");
  }

  void check_vectors(const char* argument, const View& view) const {
    if (!dtype_of(view))
      fail(name_, ": ", argument, " must be a float64, float32, float16 or bfloat16 tensor");
    if (view.dtype != q_.dtype) fail(name_, ": ", argument, " must have q's dtype");
    check_device(argument, view);
    if (view.dim != 4 || view.sizes[3] % 2 != 0) {
      fail(name_, ": ", argument, " must have shape (batch, heads, length, even head_dim); got ",
           shape_of(view));
    }
    if (view.sizes[1] > std::numeric_limits<int>::max() / 2)
      fail(name_, ": ", argument, " has too many heads: ", view.sizes[1]);
  }

  void check_table(const char* argument, const View& view) const {
    if (!dtype_of(view))
      fail(name_, ": ", argument, " must be a float64, float32, float16 or bfloat16 tensor");
    check_device(argument, view);
    const int64_t dim = view.dim;
    const bool fits =
        (dim == 2 || dim == 3) && view.sizes[dim - 2] == params_.length &&
        (view.sizes[dim - 1] == params_.head_dim || view.sizes[dim - 1] * 2 == params_.head_dim) &&
        (dim == 2 || view.sizes[0] == 1 || view.sizes[0] == params_.batch);
    if (!fits) {
      fail(name_, ": ", argument, " must have shape ([", params_.batch, " or 1,] ", params_.length,
           ", ", params_.head_dim, " or ", params_.head_dim / 2, "); got ", shape_of(view));
    }
  }

  void set_tables(const Tensor& cos, const Tensor& sin) {
    const View cos_view(cos), sin_view(sin);
    if (sin_view.dtype != cos_view.dtype) fail(name_, ": sin must have cos's dtype");
    if (shape_of(sin_view) != shape_of(cos_view)) {
      fail(name_, ": sin must have cos's shape ", shape_of(cos_view), "; got ", shape_of(sin_view));
    }
    params_.half_tables = cos_view.sizes[cos_view.dim - 1] != params_.head_dim;
    params_.table_dtype = *dtype_of(cos_view);
    if (params_.dtype == DType::kFloat64) {
      params_.table_dtype = DType::kFloat64;
    } else if (params_.table_dtype != params_.dtype) {
      params_.table_dtype = DType::kFloat32;
    }
    if (cos_view.dtype == torch_dtype(params_.table_dtype)) {
      set_table(cos_view, &params_.cos);
      set_table(sin_view, &params_.sin);
      return;
    }
    // Tables are small, and kernels for every pair of dtypes are not.
    using torch::headeronly::ScalarType;
    const bool is_double = params_.dtype == DType::kFloat64;
    const ScalarType dtype = is_double ? ScalarType::Double : ScalarType::Float;
    set_table(View(converted_.emplace_back(torch::stable::to(cos, dtype))), &params_.cos);
    set_table(View(converted_.emplace_back(torch::stable::to(sin, dtype))), &params_.sin);
  }

  static void set_table(const View& view, RopeTable* table) {
    table->data = view.data;
    table->strides[0] = view.dim == 3 && view.sizes[0] > 1 ? view.strides[0] : 0;
    table->strides[1] = view.strides[view.dim - 2];
    table->strides[2] = view.strides[view.dim - 1];
  }

  const char* name_;
  View q_, k_;
  RopeParams params_;
  std::vector<Tensor> converted_;  // tables in another dtype, kept until the launch
};

// --- Operators

std::tuple<Tensor, Tensor> turn(const char* name, const Tensor& q, const Tensor& k,
                                const Tensor& cos, const Tensor& sin, bool interleaved,
                                bool transposed) {
  RopeCall call(name, q, k, cos, sin, interleaved, transposed);
  std::tuple<Tensor, Tensor> outputs(empty_like(q, call.q()), empty_like(k, call.k()));
  call.set_outputs(std::get<0>(outputs), std::get<1>(outputs));
  call.launch();
  return outputs;
}

std::tuple<Tensor, Tensor> rope(const Tensor& q, const Tensor& k, const Tensor& cos,
                                const Tensor& sin, bool interleaved) {
  return turn("rope", q, k, cos, sin, interleaved, false);
}

std::tuple<Tensor, Tensor> rope_backward(const Tensor& dq, const Tensor& dk, const Tensor& cos,
                                         const Tensor& sin, bool interleaved) {
  return turn("rope_backward", dq, dk, cos, sin, interleaved, true);
}

void rope_(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin,
           bool interleaved) {
  RopeCall call("rope_", q, k, cos, sin, interleaved, false);
  call.set_outputs_in_place();
  call.launch();
}

// What rope(q, k, ...) or rope_(q, k, ...) would launch, as JSON. The operands may be CPU tensors,
// which stand for CUDA tensors of that layout; of what is allocated here only the layout matters.
std::string rope_plan(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin,
                      bool interleaved, int64_t num_sms, bool in_place) {
  RopeCall call(in_place ? "rope_" : "rope", q, k, cos, sin, interleaved, false);
  Tensor q_output = q, k_output = k;
  if (in_place) {
    call.set_outputs_in_place();
  } else {
    q_output = empty_like(q, call.q());
    k_output = empty_like(k, call.k());
    call.set_outputs(q_output, k_output);
  }
  return call.describe_plan(call.plan(planned_device<rope_device_traits>(num_sms)));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedcuda, CUDA, m) {
  m.impl("rope", TORCH_BOX(&rope));
  m.impl("rope_", TORCH_BOX(&rope_));
  m.impl("rope_backward", TORCH_BOX(&rope_backward));
}

STABLE_TORCH_LIBRARY_IMPL(fusedcuda, CompositeExplicitAutograd, m) {
  m.impl("rope_plan", TORCH_BOX(&rope_plan));
}

}  // namespace fusedcuda
