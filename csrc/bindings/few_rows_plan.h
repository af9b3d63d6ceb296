// What plans say of a product of few rows (../kernels/common/few_rows_config.h).
#pragma once

#include <string>

#include "../kernels/common/few_rows_config.h"
#include "shim.h"

namespace fusedcuda {

// As more members of a JSON object.
inline std::string few_rows_members(const FewRowsConfig& c) {
  return concat(", \"threads\": ", kFewRowsThreads, ", \"cluster\": ", c.cluster(),
                ", \"blocks\": ", c.blocks(), ", \"tiles\": ", c.tiles,
                ", \"tiles_at_a_time\": ", c.tiles_of_group, ", \"steps\": ", c.steps,
                ", \"shared_bytes\": ", c.shared_bytes);
}

}  // namespace fusedcuda
