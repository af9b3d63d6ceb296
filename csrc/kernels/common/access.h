// The ways to reach a vector of neighbouring elements of a tensor; chosen on the host, followed on
// the device.
#pragma once

namespace fusedcuda {

enum class Access {
  kAbsent,  // an output nobody asked for
  kNumber,  // the value travels in the parameters
  kLinear,  // laid out like the iteration space: one vector at the linear index
  kInner,   // innermost stride 1, aligned rows: one vector at its row's offset (a bias, a half of a
            // packed tensor)
  kOuter,   // innermost stride 0: one element for the whole vector (a value per row)
  kGather,  // anything else: element by element
};

inline const char* name_of(Access access) {
  switch (access) {
    case Access::kAbsent:
      return "absent";
    case Access::kNumber:
      return "number";
    case Access::kLinear:
      return "linear";
    case Access::kInner:
      return "inner";
    case Access::kOuter:
      return "outer";
    default:
      return "gather";
  }
}

}  // namespace fusedcuda
