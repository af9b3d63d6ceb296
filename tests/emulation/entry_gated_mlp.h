// A call of a gated MLP's product, from Python.
#pragma once

#include "kernels/gated_mlp.h"

// Call in gated_mlp_emulator.py.
struct Call {
  int dtype, activation, num_sms, group, tile;
  int64_t m, f, k;
  void *x, *w_gate, *w_up, *h, *gate_up;
  int64_t x_stride, w_gate_stride, w_up_stride, h_stride;

  fusedcuda::GatedProductParams params() const {
    fusedcuda::GatedProductParams params;
    params.dtype = static_cast<fusedcuda::DType>(dtype);
    params.activation = static_cast<fusedcuda::Activation>(activation);
    params.m = m;
    params.f = f;
    params.k = k;
    params.x = {x, x_stride};
    params.w_gate = {w_gate, w_gate_stride};
    params.w_up = {w_up, w_up_stride};
    params.h = {h, h_stride};
    params.gate_up = gate_up;
    return params;
  }

  fusedcuda::DeviceTraits device() const {
    fusedcuda::DeviceTraits device;
    device.num_sms = num_sms;
    return device;
  }
};
