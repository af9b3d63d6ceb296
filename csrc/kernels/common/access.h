// The ways a thread reaches its elements of a tensor; chosen on the host, followed on the device.
#pragma once

namespace fusedcuda {

enum class Access {
  kAbsent,  // an output nobody asked for
  kNumber,  // the value travels in the launch parameters
  kSplat,   // constant along the columns: one element for the whole vector (a value per row)
  kVector,  // neighbours in memory and aligned: one 16-byte access
  // One element at a time:
  kUnaligned,  // neighbouring columns are neighbours in memory, but not in whole vectors
  kElement,    // any other stride
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
    case Access::kUnaligned:
      return "unaligned";
    default:
      return "element";
  }
}

}  // namespace fusedcuda
