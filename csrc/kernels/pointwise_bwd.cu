// Launcher of the gradients (pointwise_bwd.cuh), and of the sums of those of broadcast operands.

#include "common/gather.cuh"
#include "common/launch.h"
#include "common/sum_partials.cuh"
#include "common/walk.cuh"
#include "pointwise.h"
#include "pointwise_bwd.cuh"
#include "pointwise_formulas.cuh"
#include "pointwise_launch.cuh"

namespace fusedcuda {
namespace pointwise {

template <PointwiseOp kOp, typename T>
struct Backward {
  static cudaError_t run(const PointwiseParams& params, const PointwisePlan& plan, void* workspace,
                         cudaStream_t stream) {
    constexpr int kOperands = Formula<kOp>::kOperands;
    PartialSums sums = {};
    SumPartialsParams finish = {};
    unsigned num_reduced = 0;
    Compute<T>* next = static_cast<Compute<T>*>(workspace);
    for (int k = 0; k < kOperands; ++k) {
      const int64_t values = plan.num_values[k];
      sums.kinds[k] = plan.gradients[k];
      if (values == 0) continue;
      sums.partials[k] = next;
      finish.partials[num_reduced] = next;
      finish.outputs[num_reduced] = params.tensors[kOperands + 1 + k].data;
      finish.values[num_reduced] = values;
      finish.partials_per_value[num_reduced] = plan.num_partials[k];
      next += values * plan.num_partials[k];
      ++num_reduced;
    }

    const LaunchShape shape(plan);
    const auto table = make_table<kBwdTensors<kOp>>(params, plan);
    auto start = [&](auto kernel, const auto&... args) {
      return launch(kernel, shape.grid, shape.block, plan.dependent_launch, stream, table, args...);
    };
    constexpr int kVec = kVectorWidth<T>;
    const bool vectors = all_in_vectors(plan);
    const Activation activation = params.activation;
    if (num_reduced == 0) {
      if (!vectors) return start(pointwise_bwd_kernel<kOp, T, 1>, activation);
      const cudaError_t status = start(pointwise_bwd_kernel<kOp, T, kVec>, activation);
      if (status != cudaSuccess || plan.rest == 0) return status;
      const Rest rest(params, plan);
      return run(rest.params, rest.plan, workspace, stream);
    }
    if constexpr (!Formula<kOp>::kHasSums) {
      return cudaErrorInvalidValue;
    } else {
      const cudaError_t status =
          vectors ? start(pointwise_bwd_sum_kernel<kOp, T, kVec>, sums, activation)
                  : start(pointwise_bwd_sum_kernel<kOp, T, 1>, sums, activation);
      if (status != cudaSuccess) return status;
      return launch_sum_partials<T>(finish, num_reduced, plan.sum_tile_x, plan.dependent_launch,
                                    stream);
    }
  }
};

}  // namespace pointwise

// An empty space has gradients only of broadcast operands, all zero; the binding fills them.
cudaError_t launch_pointwise_bwd(const PointwiseParams& params, const PointwisePlan& plan,
                                 void* workspace, cudaStream_t stream) {
  if (plan.path == PointwisePath::kEmpty) return cudaSuccess;
  return pointwise::dispatch<pointwise::Backward>(params.op, params.dtype, params, plan, workspace,
                                                  stream);
}

}  // namespace fusedcuda
