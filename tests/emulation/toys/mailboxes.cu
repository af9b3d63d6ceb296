// Two blocks in a cluster send each other mail. Threads 0 to 31 of each have 32 of the numbers.
#include "kernels/common/cluster.cuh"
#include "kernels/common/shared.cuh"
#include "toys.h"

namespace {

using namespace fusedcuda;

// Two barriers, then two sets of slots.
constexpr int kSlots = 32;
constexpr int kBytes = 2 * sizeof(uint64_t) + 2 * kSlots * sizeof(double);
constexpr int kMail = kSlots * sizeof(float);

__device__ uint64_t* barriers() { return static_cast<uint64_t*>(dynamic_shared()); }
__device__ ClusterMailbox mailbox(int i = 0) { return ClusterMailbox(barriers() + i); }

template <typename T = float>
__device__ T* slots(int set = 0) {
  return reinterpret_cast<T*>(barriers() + 2) + set * kSlots;
}

__device__ bool has_number() { return threadIdx.x < kSlots; }
__device__ float& number(float* data) { return data[cluster_rank() * kSlots + threadIdx.x]; }
__device__ unsigned other_rank() { return cluster_size() - 1 - cluster_rank(); }

__device__ void init() {
  if (threadIdx.x != 0) return;
  mailbox(0).init();
  mailbox(1).init();
}

__device__ void cluster_barrier() {
  cluster_arrive();
  cluster_wait();
}

__device__ void start() {
  init();
  cluster_arrive();
  cudaGridDependencySynchronize();
  cluster_wait();
}

__device__ void expect(int bytes, int i = 0) {
  if (threadIdx.x == 0) mailbox(i).expect(bytes);
}

template <typename T>
__device__ void send(T value, int i = 0, int set = 0) {
  if (has_number()) mailbox(i).send(slots<T>(set) + threadIdx.x, other_rank(), value);
}

__device__ void receive(float* data) {
  if (has_number()) number(data) = slots()[threadIdx.x];
}

template <typename T>
__global__ void mail(float* data) {
  start();
  expect(kSlots * sizeof(T));
  if (has_number()) send(static_cast<T>(number(data)));
  mailbox().wait(0);
  if (has_number()) number(data) = static_cast<float>(slots<T>()[threadIdx.x]);
}
constexpr auto mail_floats = mail<float>, mail_doubles = mail<double>;
TOY(mail_floats, 2, kBytes);
TOY(mail_doubles, 2, kBytes);

__global__ void mail_to_both(float* data) {
  start();
  expect(2 * kMail);
  for (unsigned rank = 0; rank < 2 && has_number(); ++rank)
    mailbox().send(slots(cluster_rank()) + threadIdx.x, rank, number(data));
  mailbox().wait(0);
  if (has_number()) number(data) = slots(0)[threadIdx.x] + 100 * slots(1)[threadIdx.x];
}
TOY(mail_to_both, 2, kBytes);

// Each round sends on what the last one has brought, and one more. Nobody is early for the next but
// one: that both blocks have sent for the next says that they are through with this one.
template <int kMailboxes, int kSets, bool kClusterBarrier = false>
__global__ void rounds(float* data) {
  start();
  float value = has_number() ? number(data) : 0;
  for (int round = 0; round < 5; ++round) {
    const int i = round % kMailboxes, set = round % kSets;
    expect(kMail, i);
    send(value, i, set);
    mailbox(i).wait(round / kMailboxes % 2);
    if (has_number()) value = slots(set)[threadIdx.x] + 1;
    if (kClusterBarrier) {
      cluster_barrier();
    } else {
      __syncthreads();
    }
  }
  if (has_number()) number(data) = value;
}
constexpr auto mailboxes_in_turns = rounds<2, 2>, one_mailbox_with_barriers = rounds<1, 1, true>;
constexpr auto one_mailbox = rounds<1, 2>, one_set_of_slots = rounds<2, 1>;
TOY(mailboxes_in_turns, 2, kBytes);
TOY(one_mailbox_with_barriers, 2, kBytes);
TOY(one_mailbox, 2, kBytes);
TOY(one_set_of_slots, 2, kBytes);

// ---- What depends on the order
// -------------------------------------------------------------------

__global__ void reads_mail_before_waiting(float* data) {
  start();
  expect(kMail);
  if (has_number()) send(number(data));
  const float early = has_number() ? slots()[threadIdx.x] : 0;
  mailbox().wait(0);
  if (has_number()) number(data) = early;
}
TOY(reads_mail_before_waiting, 2, kBytes);

__global__ void takes_a_barrier_for_mail(float* data) {
  start();
  expect(kMail);
  if (has_number()) send(number(data));
  cluster_barrier();
  receive(data);
  mailbox().wait(0);
}
TOY(takes_a_barrier_for_mail, 2, kBytes);

// Everybody has waited when the next value comes, but not read.
__global__ void overwrites_unread_mail(float* data) {
  start();
  expect(kMail);
  if (has_number()) send(number(data));
  mailbox(0).wait(0);
  cluster_barrier();
  expect(kMail, 1);
  send(-1.0f, 1);
  receive(data);
  mailbox(1).wait(0);
}
TOY(overwrites_unread_mail, 2, kBytes);

// ---- Errors
// --------------------------------------------------------------------------------------

__global__ void sends_mail_before_init(float*) {
  cluster_barrier();
  init();
  __syncthreads();
  send(1.0f);
  cluster_barrier();
}
TOY(sends_mail_before_init, 2, kBytes);

__global__ void sends_mail_between_init_and_wait(float*) {
  init();
  cluster_arrive();
  send(1.0f);
  cluster_wait();
}
TOY(sends_mail_between_init_and_wait, 2, kBytes);

__global__ void init_after_arriving(float*) {
  cluster_arrive();
  init();
  cluster_wait();
  send(1.0f);
}
TOY(init_after_arriving, 2, kBytes);

__global__ void initializes_twice(float*) {
  start();
  init();
}
TOY(initializes_twice, 2, kBytes);

template <int kExpected>
__global__ void expects(float* data) {
  start();
  if (kExpected != 0) expect(kExpected);
  send(1.0f);
  mailbox().wait(0);
}
constexpr auto expects_too_little = expects<kMail - 4>, expects_too_much = expects<kMail + 4>;
constexpr auto expects_nothing = expects<0>, expects_negative = expects<-4>;
TOY(expects_too_little, 2, kBytes);
TOY(expects_too_much, 2, kBytes);
TOY(expects_nothing, 2, kBytes);
TOY(expects_negative, 2, kBytes);

__global__ void expects_twice(float*) {
  start();
  expect(kMail);
  expect(kMail);
}
TOY(expects_twice, 2, kBytes);

__global__ void sends_mail_twice(float*) {
  start();
  expect(2 * kMail);
  send(1.0f);
  send(2.0f);
  mailbox().wait(0);
}
TOY(sends_mail_twice, 2, kBytes);

__global__ void waits_for_another_round(float*) {
  start();
  expect(kMail);
  send(1.0f);
  mailbox().wait(threadIdx.x == 9);
}
TOY(waits_for_another_round, 2, kBytes);

__global__ void one_thread_does_not_wait(float*) {
  start();
  expect(kMail);
  send(1.0f);
  if (threadIdx.x != 9) mailbox().wait(0);
}
TOY(one_thread_does_not_wait, 2, kBytes);

__global__ void ends_while_it_expects(float*) {
  start();
  expect(kMail);
}
TOY(ends_while_it_expects, 2, kBytes);

// Whether this is found by the block that sends or by the one that ends depends on which is first.
__global__ void sends_mail_to_ended(float*) {
  start();
  if (cluster_rank() == 0) send(1.0f);
}
TOY(sends_mail_to_ended, 2, kBytes);

__global__ void sends_mail_past_the_last(float*) {
  start();
  mailbox().send(slots(), cluster_size(), 1.0f);
}
TOY(sends_mail_past_the_last, 2, kBytes);

__global__ void sends_mail_to_static(float*) {
  __shared__ float slot;
  start();
  mailbox().send(&slot, other_rank(), 1.0f);
}
TOY(sends_mail_to_static, 2, kBytes);

__global__ void has_static_mailbox(float*) {
  __shared__ uint64_t barrier;
  ClusterMailbox(&barrier).init();
}
TOY(has_static_mailbox, 2, kBytes);

__global__ void sends_misaligned_mail(float*) {
  start();
  mailbox().send(reinterpret_cast<float*>(reinterpret_cast<char*>(slots()) + 2), other_rank(),
                 1.0f);
}
TOY(sends_misaligned_mail, 2, kBytes);

__global__ void overwrites_a_mailbox(float*) {
  start();
  if (threadIdx.x == 9) *barriers() = 0;
  cluster_barrier();
  mailbox().wait(0);
}
TOY(overwrites_a_mailbox, 2, kBytes);

__global__ void overwrites_a_mailbox_at_last(float*) {
  start();
  if (threadIdx.x == 9) *barriers() = 0;
}
TOY(overwrites_a_mailbox_at_last, 2, kBytes);

}  // namespace
