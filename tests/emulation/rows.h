// What entry_softmax.cpp and entry_cross_entropy.cpp share; in Python: row_emulator.py.
#pragma once

#include "entry.h"
#include "kernels/common/row.h"

namespace emulation {

struct Rows {
  int dtype;
  int64_t rows;
  int columns;
  int num_sms, clusters;  // of the GPU that the configuration is chosen for
};

struct Matrix {
  void* data;
  int64_t stride;
};

// Results: what was chosen.
struct Chosen {
  const char* path;
  int aligned, items, threads_per_row, rows_per_block, cluster;
};

inline fusedcuda::DeviceTraits device_of(const Rows& rows) {
  fusedcuda::DeviceTraits device;
  device.num_sms = rows.num_sms;
  device.clusters = device.dependent_launch = rows.clusters;
  return device;
}

inline fusedcuda::RowMatrix matrix_of(const Rows& rows, const Matrix& matrix) {
  if (matrix.data == nullptr) return {};
  return fusedcuda::RowMatrix::make(matrix.data, matrix.stride, rows.rows, rows.columns,
                                    size_of(static_cast<fusedcuda::DType>(rows.dtype)));
}

template <typename Params>
void set_rows(const Rows& rows, Params* params) {
  params->dtype = static_cast<fusedcuda::DType>(rows.dtype);
  params->rows = rows.rows;
  params->columns = rows.columns;
}

inline Chosen chosen(const fusedcuda::RowConfig& config) {
  return {name_of(config.path),   config.aligned,        config.items,
          config.threads_per_row, config.rows_per_block, config.cluster};
}

}  // namespace emulation
