// A layer of few inputs and many rows, as the first one of a DLRM: act(x @ weight.T + bias), bound
// by the write of the output; see common/narrow_rows.cuh. A thread's eight results are one byte of
// a ReLU's mask, and a ReLU whose input nobody needs is part of the rounding.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/gemm_activation.cuh"
#include "common/narrow_rows.cuh"
#include "linear_act.h"
#include "linear_act_config.h"

namespace fusedcuda {

struct LinearNarrowParams {
  NarrowParams rows;
  Activation activation = Activation::kNone;
  SavedForBackward saves = SavedForBackward::kNone;
  void* saved = nullptr;
  int64_t mask_stride = 0;  // bytes of a row of a mask
};

template <typename T, bool kSaves, typename Act>
struct NarrowActivation {
  const LinearNarrowParams& p;
  const Act& act;

  __device__ __forceinline__ void operator()(bool exists, T* to, int64_t row, int64_t column,
                                             const float (&z)[8]) const {
    if (!exists) return;
    if constexpr (Act::kIsRelu && !kSaves) {
      store_words(to, {pack_relu<T>(z[0], z[1]), pack_relu<T>(z[2], z[3]), pack_relu<T>(z[4], z[5]),
                       pack_relu<T>(z[6], z[7])});
      return;
    }
    float y[8], derivative[8];
    act(z, y, derivative);
    store_eight(to, y);
    if constexpr (kSaves && Act::kIsRelu) {
      unsigned bits = 0;
#pragma unroll
      for (int j = 0; j < 8; ++j) bits |= (z[j] <= 0.0f ? 0u : 1u) << j;
      static_cast<uint8_t*>(p.saved)[row * p.mask_stride + column / 8] = static_cast<uint8_t>(bits);
    } else if constexpr (kSaves) {
      store_eight(static_cast<T*>(p.saved) + row * p.rows.n + column, derivative);
    }
  }
};

// kIsPlain: no activation or a ReLU, and nothing is saved.
template <typename T, bool kIsPlain>
__global__ void __launch_bounds__(kNarrowThreads, narrow_blocks_of_sm(kIsPlain))
    linear_narrow_kernel(const __grid_constant__ LinearNarrowParams p) {
  alignas(16) __shared__ unsigned char memory[kNarrowWarps * kNarrowBytesOfWarp];
  wait_for_previous_kernel();
  let_next_kernel_start();
  NarrowRows<T, /*kBKInner=*/true, /*kHasBias=*/true> rows(p.rows, memory);
  auto run = [&](auto saves, const auto& act) {
    rows.run(NarrowActivation<T, decltype(saves)::value, std::decay_t<decltype(act)>>{p, act});
  };
  if constexpr (kIsPlain) {
    if (p.activation == Activation::kRelu) {
      run(std::false_type(), FixedActivation<Activation::kRelu>());
    } else {
      run(std::false_type(), FixedActivation<Activation::kNone>());
    }
  } else {
    with_activation(p.activation, [&](auto act) {
      if (p.saves != SavedForBackward::kNone) {
        run(std::true_type(), act);
      } else {
        run(std::false_type(), act);
      }
    });
  }
}

}  // namespace fusedcuda
