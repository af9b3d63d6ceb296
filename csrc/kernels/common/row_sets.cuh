// Which rows the persistent blocks of a pipeline (row_pipeline.cuh) take, and in which order.
#pragma once

#include <cstdint>
#include <type_traits>

#include "row_pipeline.h"

namespace fusedcuda {

// Sets of rows that a group of blocks takes one after the other: of blockDim.y rows each, one for
// every threadIdx.y. Index: of a row.
template <typename Index>
struct RowSegment {
  Index begin, end, step;  // of the sets
  int phase, phases;       // the rows' numbers are phase, phase + phases, ...

  __device__ Index row(Index set) const {
    const Index height = blockDim.y, place = threadIdx.y;
    return (set * height + place) * phases + phase;
  }
};

// The segments that group `group` of `groups` takes. kPhased: rows are put in order of their
// phases, each phase filled up to whole sets and all to the same number of sets, and a group takes
// its share of that in one piece. So it has seldom more than two segments, and together the groups
// have groups + phases - 1 at most. Otherwise there is one segment of every groups-th set. 32 bits
// suffice for rows in phases (choose_access).
template <RowAccess kAccess,
          typename Index = std::conditional_t<kAccess == RowAccess::kPhased, int, int64_t>>
class RowSets {
  static constexpr bool kPhased = kAccess == RowAccess::kPhased;

 public:
  __device__ RowSets(int64_t rows, int64_t group, int64_t groups, int phases)
      : phases_(kPhased ? phases : 1) {
    const Index height = phases_ * static_cast<int>(blockDim.y);
    sets_ = static_cast<Index>((rows + height - 1) / height);
    if constexpr (kPhased) {
      const Index first = static_cast<Index>(group * sets_ * phases / groups);
      left_ = static_cast<Index>((group + 1) * sets_ * phases / groups) - first;
      phase_ = first / sets_;
      begin_ = first - phase_ * sets_;
      leaves_gap_ = group > 0 && begin_ == 0;
    } else {
      begin_ = static_cast<Index>(group);
      step_ = static_cast<Index>(groups);
    }
  }

  // do sets.segment() ... while (sets.advance()): a group has one at least.
  __device__ RowSegment<Index> segment() const {
    return {begin_, kPhased ? end() : sets_, step_, phase_, phases_};
  }
  __device__ bool advance() {
    if constexpr (!kPhased) return false;
    left_ -= end() - begin_;
    begin_ = 0;
    ++phase_;
    leaves_gap_ = false;
    return left_ > 0;
  }

  // What a segment leaves has its own place among the results of all. Where a group begins with a
  // phase, the place before is nobody's.
  __device__ int64_t place(int64_t group) const { return group + phase_; }
  __device__ bool leaves_gap() const { return leaves_gap_; }

 private:
  __device__ Index end() const { return min(begin_ + left_, sets_); }

  int phases_;
  Index sets_;  // of a phase
  Index begin_, left_ = 0, step_ = 1;
  int phase_ = 0;
  bool leaves_gap_ = false;
};

}  // namespace fusedcuda
