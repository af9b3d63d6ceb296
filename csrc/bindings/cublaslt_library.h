// cuBLASLt as torch has loaded it. Nothing is linked: the functions are looked up in the library
// that is already in the process, so that a build needs the header only and torch's handle goes
// with the code that made it.
#pragma once

#include <cublasLt.h>
#include <dlfcn.h>

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace fusedcuda {

#define FUSEDCUDA_TEXT(value) #value
#define FUSEDCUDA_SONAME(library, major) library ".so." FUSEDCUDA_TEXT(major)
// The major version of the header: its enumerations hold for libraries of this version.
inline constexpr const char* kCublasLtSoname = FUSEDCUDA_SONAME("libcublasLt", CUBLAS_VER_MAJOR);
inline constexpr const char* kCublasSoname = FUSEDCUDA_SONAME("libcublas", CUBLAS_VER_MAJOR);
#undef FUSEDCUDA_SONAME
#undef FUSEDCUDA_TEXT

// A library by its file or soname; one that is in the process already, if there is one.
class SharedLibrary {
 public:
  explicit SharedLibrary(const char* name) : name_(name) {
    handle_ = dlopen(name, RTLD_NOW | RTLD_NOLOAD);
    if (handle_ == nullptr) handle_ = dlopen(name, RTLD_NOW);
    if (handle_ == nullptr) throw std::runtime_error(std::string("fusedcuda: ") + dlerror());
  }

  template <typename Function>
  void find(const char* symbol, Function** function) const {
    *function = reinterpret_cast<Function*>(dlsym(handle_, symbol));
    if (*function == nullptr)
      throw std::runtime_error("fusedcuda: " + name_ + " has no function " + symbol);
  }

 private:
  std::string name_;
  void* handle_;  // stays open: plans and torch use the library until the process ends
};

// The functions used, by their names without the prefix. FUSEDCUDA_CUBLASLT names another library
// than torch's.
struct CublasLt {
  decltype(&cublasLtGetVersion) get_version;
  decltype(&cublasLtGetStatusString) status_string;
  decltype(&cublasLtMatmul) matmul;
  decltype(&cublasLtMatmulDescCreate) desc_create;
  decltype(&cublasLtMatmulDescDestroy) desc_destroy;
  decltype(&cublasLtMatmulDescSetAttribute) desc_set;
  decltype(&cublasLtMatrixLayoutCreate) layout_create;
  decltype(&cublasLtMatrixLayoutDestroy) layout_destroy;
  decltype(&cublasLtMatrixLayoutSetAttribute) layout_set;
  decltype(&cublasLtMatmulPreferenceCreate) preference_create;
  decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set;
  decltype(&cublasLtMatmulAlgoGetHeuristic) get_heuristic;
  decltype(&cublasLtMatmulAlgoCheck) algo_check;
  decltype(&cublasLtMatmulAlgoConfigGetAttribute) algo_get;

  static const CublasLt& get() {
    static const CublasLt functions;
    return functions;
  }

 private:
  CublasLt() {
    const char* other = std::getenv("FUSEDCUDA_CUBLASLT");
    const SharedLibrary library(other != nullptr && *other != '\0' ? other : kCublasLtSoname);
    library.find("cublasLtGetVersion", &get_version);
    library.find("cublasLtGetStatusString", &status_string);
    library.find("cublasLtMatmul", &matmul);
    library.find("cublasLtMatmulDescCreate", &desc_create);
    library.find("cublasLtMatmulDescDestroy", &desc_destroy);
    library.find("cublasLtMatmulDescSetAttribute", &desc_set);
    library.find("cublasLtMatrixLayoutCreate", &layout_create);
    library.find("cublasLtMatrixLayoutDestroy", &layout_destroy);
    library.find("cublasLtMatrixLayoutSetAttribute", &layout_set);
    library.find("cublasLtMatmulPreferenceCreate", &preference_create);
    library.find("cublasLtMatmulPreferenceDestroy", &preference_destroy);
    library.find("cublasLtMatmulPreferenceSetAttribute", &preference_set);
    library.find("cublasLtMatmulAlgoGetHeuristic", &get_heuristic);
    library.find("cublasLtMatmulAlgoCheck", &algo_check);
    library.find("cublasLtMatmulAlgoConfigGetAttribute", &algo_get);
  }
};

// Throws on a status that is a mistake of the caller or of this package. That no algorithm fits is
// not one: see MatmulPlan.
inline void check_cublaslt(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw std::runtime_error(std::string("fusedcuda: cuBLASLt refused ") + what + ": " +
                           CublasLt::get().status_string(status));
}

}  // namespace fusedcuda
