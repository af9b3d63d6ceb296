// The activations every family shares, as a run-time value. The order is that of ACTIVATIONS in
// fusedcuda/ops/_activations.py; a test compares the two.
#pragma once

namespace fusedcuda {

enum class Activation { kNone, kRelu, kReluSquared, kSigmoid, kTanh, kGelu, kGeluTanh, kSilu };

constexpr int kNumActivations = 8;

}  // namespace fusedcuda
