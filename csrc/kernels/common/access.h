// The ways a thread reaches its elements of a tensor; chosen on the host, followed on the device.
#pragma once

namespace fusedcuda {

enum class Access {
  kAbsent,   // an output nobody asked for
  kNumber,   // the value travels in the launch parameters
  kSplat,    // constant along the columns: one element for the whole vector (a value per row)
  kVector,   // neighbouring columns are neighbours in memory and aligned: one 16-byte access
  kElement,  // any stride: one element at a time
};

inline const char* name_of(Access access) {
  switch (access) {
    case Access::kAbsent:
      return "absent";
    case Access::kNumber:
      return "number";
    case Access::kSplat:
      return "splat";
    case Access::kVector:
      return "vector";
    default:
      return "element";
  }
}

}  // namespace fusedcuda
