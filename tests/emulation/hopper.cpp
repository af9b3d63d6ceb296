// Boxes arrive, products are computed and results are stored when they are waited for, or, in the
// other order, at once: whoever reads too early, or overwrites too early, gets other results.
#include "hopper.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstring>

#include "kernels/common/tensor_map.h"
#include "threads.h"

namespace emulation {
namespace {

constexpr int kRowBytes = 128, kChunkBytes = 16, kBlockBytes = 1024;
constexpr int kWarpgroup = 128;
constexpr int kProductK = 16;
constexpr int kOperationLine = -1;  // of a warp's operations: all calls are alike

size_t offset_in_shared(const void* address, size_t alignment) {
  const GuardedMemory& shared = *current->block->shared;
  if (!shared.contains(address)) complain(" uses an address outside of its dynamic shared memory");
  const size_t offset = static_cast<const std::byte*>(address) - shared.data();
  if (offset % alignment != 0) complain(" uses shared memory that is not aligned as it has to be");
  return offset;
}

Barrier& find_barrier(Block& block, size_t offset) {
  const auto found = block.hopper.barriers.find(offset);
  if (found == block.hopper.barriers.end()) complain(" uses a barrier before it is initialized");
  return found->second;
}

Block& block_of(unsigned rank) {
  if (rank >= cluster.blocks.size()) complain(" names a block that its cluster does not have");
  return *cluster.blocks[rank];
}

void end_round_if_complete(Block& block, size_t offset) {
  Barrier& barrier = block.hopper.barriers.at(offset);
  if (barrier.arrived < barrier.arrivals || barrier.bytes_missing != 0) return;
  barrier.arrived = 0;
  ++barrier.rounds;
  for (const auto& thread : block.threads) {
    const HopperThread& waiting = thread->hopper;
    if (thread->wait == Wait::kBarrierObject && waiting.barrier == offset &&
        waiting.parity != barrier.rounds % 2)
      thread->wait = Wait::kNothing;
  }
}

// Where a matrix in swizzled rows of 128 bytes has a row's element.
size_t swizzled(int row, int byte) {
  return row * kRowBytes + ((byte / kChunkBytes) ^ (row % 8)) * kChunkBytes + byte % kChunkBytes;
}

std::byte* element(const fusedcuda::BoxedMatrix& matrix, int64_t row, int64_t column) {
  return static_cast<std::byte*>(matrix.data) +
         (row * matrix.stride + column) * matrix.element_bytes;
}

size_t place_in_box(const fusedcuda::BoxedMatrix& matrix, int row, int byte) {
  return matrix.element_bytes == 2 ? swizzled(row, byte) : row * matrix.box_bytes() + byte;
}

// Calls f(place in the box, row, column) for every element inside of the matrix.
template <typename F>
void for_box(const fusedcuda::BoxedMatrix& matrix, int row, int column, F f) {
  const int size = matrix.element_bytes;
  for (int r = 0; r < matrix.box_rows; ++r) {
    for (int c = 0; c < matrix.box_bytes() / size; ++c) {
      if (row + r < matrix.rows && column + c < matrix.columns)
        f(place_in_box(matrix, r, size * c), row + r, column + c);
    }
  }
}

void deliver(const Load& load) {
  std::copy(load.rows.begin(), load.rows.end(), load.block->shared->data() + load.to);
  load.block->hopper.barriers.at(load.barrier).bytes_missing -= load.rows.size();
  end_round_if_complete(*load.block, load.barrier);
}

float number(uint16_t bits, bool is_half) {
  return is_half ? __half2float({bits}) : __bfloat162float({bits});
}

// A factor as a number: offset in shared memory, which way it lies, next_rows, values of k ahead.
struct Factor {
  size_t offset;
  bool k_is_inner;
  int next_rows, k;

  explicit Factor(uint64_t bits)
      : offset(bits & 0xfffff),
        k_is_inner(bits >> 20 & 1),
        next_rows(static_cast<int>(bits >> 24 & 0xffff) * 16),
        k(static_cast<int>(bits >> 40)) {}

  float at(const std::byte* shared, int row, int value, bool is_half) const {
    const int along = k + value;
    const size_t place = k_is_inner ? swizzled(row, 2 * along)
                                    : row / 64 * next_rows + swizzled(along, row % 64 * 2);
    uint16_t bits;
    std::memcpy(&bits, shared + offset + place, sizeof(bits));
    return number(bits, is_half);
  }
};

// The two rows of a factor a that a thread computes with.
struct Rows {
  float of[2][kProductK];
};

// Of a factor in registers (mma.cuh, wgmma.cuh), those of the quad are all that a thread's sums
// need.
Rows rows_of(const uint32_t (&a)[4], bool is_half) {
  const int own_lane = lane();
  Rows rows;
  for (int word = 0; word < 4; ++word) {
    const uint64_t* const words = exchange(kOperationLine, kAllLanes, a[word]);
    for (int quad_lane = 0; quad_lane < 4; ++quad_lane) {
      const auto bits = static_cast<uint32_t>(words[own_lane / 4 * 4 + quad_lane]);
      for (int second = 0; second < 2; ++second) {
        const int k = word / 2 * 8 + 2 * quad_lane + second;
        rows.of[word % 2][k] = number(static_cast<uint16_t>(bits >> 16 * second), is_half);
      }
    }
  }
  return rows;
}

// The thread's part of a product of 64 rows.
void multiply(const std::byte* shared, float* sums, int n, const Rows& a, Factor b, int lane,
              bool accumulate, bool is_half) {
  for (int i = 0; i < n / 2; ++i) {
    const int column = i / 4 * 8 + lane % 4 * 2 + i % 2, lower = i / 2 % 2;
    float sum = accumulate ? sums[i] : 0.0f;
    for (int k = 0; k < kProductK; ++k) sum += a.of[lower][k] * b.at(shared, column, k, is_half);
    sums[i] = sum;
  }
}

}  // namespace

void PendingList::add(std::function<void()> happen) {
  if (reversed) happen();
  items.push_back({std::move(happen), groups});
}

void PendingList::wait(unsigned pending) {
  const auto over = [&](const Pending& item) { return item.group + pending < groups; };
  const auto end = std::find_if_not(items.begin(), items.end(), over);
  for (auto item = items.begin(); item != end && !reversed; ++item) item->happen();
  items.erase(items.begin(), end);
}

// --- Barriers

void mbarrier_init(uint64_t* state, unsigned arrivals) {
  Barrier& barrier = current->block->hopper.barriers[offset_in_shared(state, 8)];
  if (barrier.arrivals != 0) complain(" initializes a barrier twice");
  if (arrivals == 0) complain(" initializes a barrier for nobody");
  barrier.arrivals = arrivals;
}

void mbarrier_arrive(uint64_t* state, unsigned rank, unsigned bytes) {
  const size_t offset = offset_in_shared(state, 8);
  Block& block = block_of(rank);
  if (rank != current->block->rank) {
    if (current->waits == 0) complain(" arrives in a block that may not have started");
    block.waits_needed = std::max(block.waits_needed, current->arrivals + 1);
  }
  Barrier& barrier = find_barrier(block, offset);
  if (barrier.arrived == barrier.arrivals) complain(" arrives once too often at a barrier");
  ++barrier.arrived;
  barrier.bytes_missing += bytes;
  end_round_if_complete(block, offset);
}

void mbarrier_wait(uint64_t* state, unsigned parity) {
  const size_t offset = offset_in_shared(state, 8);
  const Barrier& barrier = find_barrier(*current->block, offset);
  current->hopper.barrier = offset;
  current->hopper.parity = parity;
  if (barrier.rounds % 2 == parity) suspend(Wait::kBarrierObject, current->line);
}

void named_barrier(int id, int threads) {
  if (id < 1 || id > 15 || threads % kLanes != 0) complain(" names a barrier that there is not");
  unsigned& arrived = current->block->hopper.arrived[id];
  current->hopper.named = id;
  if (++arrived < static_cast<unsigned>(threads)) return suspend(Wait::kNamed, current->line);
  arrived = 0;
  for (const auto& thread : current->block->threads) {
    if (thread->wait == Wait::kNamed && thread->hopper.named == id) thread->wait = Wait::kNothing;
  }
}

// --- Copy engine

void load_box(const void* map, void* shared, uint64_t* barrier, int row, int column,
              unsigned blocks) {
  const auto& matrix = *static_cast<const fusedcuda::BoxedMatrix*>(map);
  if (row < 0 || column < 0) complain(" copies a box at a negative place");
  // (An illegal instruction on the card.)
  if (column * matrix.element_bytes % 16 != 0)
    complain(" copies a box that does not begin at a multiple of 16 bytes");
  std::vector<std::byte> rows(matrix.box_rows * matrix.box_bytes());
  for_box(matrix, row, column, [&](size_t place, int64_t from_row, int64_t from_column) {
    std::memcpy(&rows[place], element(matrix, from_row, from_column), matrix.element_bytes);
  });
  const size_t to = offset_in_shared(shared, kBlockBytes);
  const size_t at = offset_in_shared(barrier, 8);
  for (unsigned rank = 0; rank < 16; ++rank) {
    if (!(blocks >> rank & 1)) continue;
    Block& block = block_of(rank);
    if (rank != current->block->rank) {
      if (current->waits == 0) complain(" copies to a block that may not have started");
      block.waits_needed = std::max(block.waits_needed, current->arrivals + 1);
    }
    find_barrier(block, at);
    if (to + rows.size() > block.shared->size()) complain(" copies beyond shared memory");
    const Load load = {&block, to, at, rows};
    if (reversed) {
      deliver(load);
    } else {
      cluster.loads.push_back(load);
    }
  }
}

void load_bulk(void* shared, const void* global, unsigned bytes, uint64_t* barrier) {
  if (reinterpret_cast<uintptr_t>(global) % kChunkBytes != 0 || bytes % kChunkBytes != 0)
    complain(" copies what is not whole chunks of 16 bytes");
  Block& block = *current->block;
  const size_t to = offset_in_shared(shared, kChunkBytes), at = offset_in_shared(barrier, 8);
  find_barrier(block, at);
  if (to + bytes > block.shared->size()) complain(" copies beyond shared memory");
  const auto* const from = static_cast<const std::byte*>(global);
  const Load load = {&block, to, at, {from, from + bytes}};
  if (reversed) {
    deliver(load);
  } else {
    cluster.loads.push_back(load);
  }
}

// One at a time, the latest first: their order is nobody's to rely on.
bool deliver_boxes() {
  if (cluster.loads.empty()) return false;
  const Load load = std::move(cluster.loads.back());
  cluster.loads.pop_back();
  deliver(load);
  return true;
}

void store_box(const void* map, const void* shared, int row, int column) {
  const auto& matrix = *static_cast<const fusedcuda::BoxedMatrix*>(map);
  const size_t from = offset_in_shared(shared, kBlockBytes);
  if (column * matrix.element_bytes % 16 != 0)
    complain(" stores a box that does not begin at a multiple of 16 bytes");
  const unsigned group = current->number / kWarpgroup;
  for (const auto& thread : current->block->threads) {
    if (thread->number / kWarpgroup == group && thread->hopper.has_unfenced_stores)
      complain(" has the copy engine read what it may not see yet");
  }
  const std::byte* const source = current->block->shared->data() + from;
  current->hopper.stores.add([=, &matrix] {
    for_box(matrix, row, column, [&](size_t place, int64_t to_row, int64_t to_column) {
      std::memcpy(element(matrix, to_row, to_column), source + place, matrix.element_bytes);
    });
  });
}

void commit_stores() { ++current->hopper.stores.groups; }
void wait_for_stores(unsigned pending) { current->hopper.stores.wait(pending); }
void fence_shared_for_copies() { current->hopper.has_unfenced_stores = false; }

// --- Tensor cores

uint64_t wgmma_factor(const void* shared, bool k_is_inner, int next_rows) {
  return offset_in_shared(shared, kBlockBytes) | uint64_t{k_is_inner} << 20 |
         static_cast<uint64_t>(next_rows / 16) << 24;
}

uint64_t wgmma_advance(uint64_t factor, int values) {
  return factor + (static_cast<uint64_t>(values) << 40);
}

void wgmma(float* sums, int n, uint64_t factor_a, uint64_t factor_b, bool accumulate,
           bool is_half) {
  const std::byte* const shared = current->block->shared->data();
  const int thread = current->number % kWarpgroup;
  current->hopper.products.add([=] {
    Rows a;
    for (int lower = 0; lower < 2; ++lower) {
      for (int k = 0; k < kProductK; ++k) {
        const int row = thread / kLanes * 16 + thread % kLanes / 4 + lower * 8;
        a.of[lower][k] = Factor(factor_a).at(shared, row, k, is_half);
      }
    }
    multiply(shared, sums, n, a, Factor(factor_b), thread % kLanes, accumulate, is_half);
  });
}

void wgmma(float* sums, int n, const uint32_t (&a)[4], uint64_t factor_b, bool accumulate,
           bool is_half) {
  const std::byte* const shared = current->block->shared->data();
  const int own_lane = lane();
  const Rows rows = rows_of(a, is_half);
  current->hopper.products.add(
      [=] { multiply(shared, sums, n, rows, Factor(factor_b), own_lane, accumulate, is_half); });
}

void multiply_tiles(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                    bool is_half) {
  const Rows left = rows_of(a, is_half);
  for (int half = 0; half < 2; ++half) {  // of the values of k
    const uint64_t* const words = exchange(kOperationLine, kAllLanes, b[half]);
    for (int i = 0; i < 4; ++i) {
      const int column = lane() % 4 * 2 + i % 2;
      for (int k = 0; k < 8; ++k) {
        const auto bits = static_cast<uint32_t>(words[column * 4 + k / 2]) >> (k % 2 * 16);
        const float right = number(static_cast<uint16_t>(bits), is_half);
        sums[i] += left.of[i / 2][half * 8 + k] * right;
      }
    }
  }
}

void wgmma_commit() { ++current->hopper.products.groups; }
void wgmma_wait(unsigned pending) { current->hopper.products.wait(pending); }

void load_matrices(const void* row, bool transposed, uint32_t (&values)[4]) {
  offset_in_shared(row, kChunkBytes);
  const uint64_t* const rows = exchange(kOperationLine, kAllLanes, reinterpret_cast<uint64_t>(row));
  const auto element = [&](int matrix, int r, int c) {
    uint16_t bits;
    std::memcpy(&bits, reinterpret_cast<const std::byte*>(rows[matrix * 8 + r]) + 2 * c, 2);
    return bits;
  };
  const int major = lane() / 4, minor = lane() % 4 * 2;
  for (int matrix = 0; matrix < 4; ++matrix) {
    const uint32_t first =
        transposed ? element(matrix, minor, major) : element(matrix, major, minor);
    const uint32_t second =
        transposed ? element(matrix, minor + 1, major) : element(matrix, major, minor + 1);
    values[matrix] = first | second << 16;
  }
}

void store_matrices(void* row, const uint32_t (&values)[4]) {
  offset_in_shared(row, kChunkBytes);
  for (int matrix = 0; matrix < 4; ++matrix) {
    const uint64_t* const rows =
        exchange(kOperationLine, kAllLanes, reinterpret_cast<uint64_t>(row));
    auto* const to = reinterpret_cast<std::byte*>(rows[matrix * 8 + lane() / 4]) + lane() % 4 * 4;
    std::memcpy(to, &values[matrix], sizeof(uint32_t));
  }
  current->hopper.has_unfenced_stores = true;
}

// --- The end

const char* find_hopper_error(const Thread& thread) {
  if (!thread.hopper.products.items.empty())
    return " ends with products that nobody has waited for";
  if (!thread.hopper.stores.items.empty()) return " ends with stores that nobody has waited for";
  return nullptr;
}

const char* find_hopper_error(const Block& block) {
  for (const auto& [offset, barrier] : block.hopper.barriers) {
    if (barrier.bytes_missing != 0 || barrier.arrived != 0)
      return "the threads end in the middle of a round of a barrier";
  }
  return nullptr;
}

}  // namespace emulation
