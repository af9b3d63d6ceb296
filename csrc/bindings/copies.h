// Arguments of a call that are not read where they are.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "shim.h"

namespace fusedcuda {

// Arguments that had to be copied first, for the length of a call.
class Copies {
 public:
  View keep(const char* name, Tensor tensor) {
    names_.push_back(name);
    return View(tensors_.emplace_back(std::move(tensor)));
  }
  std::string names() const {
    return join(names_.size(), [&](int64_t i) { return concat("\"", names_[i], "\""); });
  }

 private:
  std::vector<const char*> names_;
  std::vector<Tensor> tensors_;
};

}  // namespace fusedcuda
