// Plans by problem: a bounded cache that many threads share, and the algorithms that tuning chose.
#pragma once

#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cublaslt_matmul.h"

namespace fusedcuda {

struct HashProblem {
  size_t operator()(const MatmulProblem& problem) const {
    static_assert(sizeof(MatmulProblem) % sizeof(uint64_t) == 0);
    uint64_t words[sizeof(MatmulProblem) / sizeof(uint64_t)];
    std::memcpy(words, &problem, sizeof(words));
    uint64_t hash = 0;
    for (uint64_t word : words) {
      hash = (hash ^ word) * 0x9e3779b97f4a7c15u;  // 2^64 over the golden ratio, odd
      hash ^= hash >> 32;
    }
    return hash;
  }
};

// The least recently used plans make room for new ones. That cuBLASLt has no algorithm for a
// problem is remembered too, as a null plan. A hit allocates nothing.
class PlanCache {
 public:
  // Some kilobytes each: far more shapes than a model has, and a bound for one that keeps changing.
  static constexpr size_t kCapacity = 4096;

  explicit PlanCache(size_t capacity = kCapacity) : capacity_(capacity) {}

  std::shared_ptr<MatmulPlan> find(const MatmulContext& context, const MatmulProblem& problem) {
    std::optional<cublasLtMatmulAlgo_t> choice;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto known = index_.find(problem);
      if (known != index_.end()) {
        entries_.splice(entries_.begin(), entries_, known->second);
        return known->second->second;
      }
      choice = choice_for(problem);
    }
    // Searching takes cuBLASLt a tenth of a millisecond, in which other threads go on. If two of
    // them search for the same plan, the first one stays.
    std::shared_ptr<MatmulPlan> plan = MatmulPlan::make(context, problem, choice);
    const std::lock_guard<std::mutex> lock(mutex_);
    return insert(problem, std::move(plan));
  }

  // From now on there is no plan for this problem: cuBLASLt had recommended an algorithm and then
  // did not run it.
  void refuse(const MatmulProblem& problem) {
    const std::lock_guard<std::mutex> lock(mutex_);
    forget(problem);
    insert(problem, nullptr);
  }

  // The algorithm for a problem, on every device; none goes back to cuBLASLt's recommendation.
  void choose(MatmulProblem problem, const std::optional<cublasLtMatmulAlgo_t>& algorithm) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto entry = entries_.begin(); entry != entries_.end();) {
      const MatmulProblem known = (entry++)->first;
      if (on_any_device(known) == on_any_device(problem)) forget(known);
    }
    problem = on_any_device(problem);
    choices_.erase(problem);
    if (algorithm) choices_.emplace(problem, *algorithm);
  }

  // What has been asked for and can be run, most recent first.
  std::vector<MatmulProblem> problems() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<MatmulProblem> result;
    for (const auto& [problem, plan] : entries_) {
      if (plan != nullptr) result.push_back(problem);
    }
    return result;
  }

  size_t size() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return entries_.size();
  }

 private:
  using Entry = std::pair<MatmulProblem, std::shared_ptr<MatmulPlan>>;

  static MatmulProblem on_any_device(MatmulProblem problem) {
    problem.device = 0;
    return problem;
  }

  std::optional<cublasLtMatmulAlgo_t> choice_for(const MatmulProblem& problem) const {
    if (choices_.empty()) return std::nullopt;
    const auto choice = choices_.find(on_any_device(problem));
    if (choice == choices_.end()) return std::nullopt;
    return choice->second;
  }

  std::shared_ptr<MatmulPlan> insert(const MatmulProblem& problem,
                                     std::shared_ptr<MatmulPlan> plan) {
    const auto known = index_.find(problem);
    if (known != index_.end()) return known->second->second;
    if (entries_.size() >= capacity_) forget(MatmulProblem(entries_.back().first));
    entries_.emplace_front(problem, std::move(plan));
    index_.emplace(problem, entries_.begin());
    return entries_.front().second;
  }

  void forget(const MatmulProblem& problem) {
    const auto known = index_.find(problem);
    if (known == index_.end()) return;
    entries_.erase(known->second);
    index_.erase(known);
  }

  const size_t capacity_;
  mutable std::mutex mutex_;
  std::list<Entry> entries_;  // most recent first
  std::unordered_map<MatmulProblem, std::list<Entry>::iterator, HashProblem> index_;
  std::unordered_map<MatmulProblem, cublasLtMatmulAlgo_t, HashProblem> choices_;
};

}  // namespace fusedcuda
