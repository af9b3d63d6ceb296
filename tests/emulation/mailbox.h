#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace emulation {

struct Block;
struct Thread;

// A value on its way to a slot in shared memory.
struct Letter {
  std::byte* slot;
  std::array<std::byte, sizeof(uint64_t)> value;
  size_t size;
};

// A ClusterMailbox (csrc/kernels/common/cluster.cuh) in one of the blocks of its cluster.
struct Mailbox {
  unsigned waits_needed = 0;  // at the cluster's barrier, before a thread may use it
  bool expects = false;       // in this round
  size_t expected = 0;        // bytes of this round
  size_t arrived = 0;
  std::vector<Letter> letters;  // of this round, unless they arrive at once
  unsigned rounds = 0;          // that are complete
  std::vector<unsigned> waits;  // that are over, of each thread
  size_t waits_left = 0;        // of all threads, for the rounds that are complete
};

// All of a block, and which of them a slot has been sent to with. The keys are offsets in dynamic
// shared memory.
struct Mailboxes {
  struct Sender {
    size_t mailbox;
    unsigned round;
  };
  std::map<size_t, Mailbox> at;
  std::map<size_t, Sender> last_sender;  // of every four bytes
};

// Lets everything arrive that completes a round; whether there was such a round.
bool deliver_mail();

// What has gone wrong with the mailboxes of a block that has ended, or null.
const char* find_mail_error(const Block& block);

// What a thread waits for that waits for a mailbox.
std::string describe_mail(const Thread& thread);

}  // namespace emulation
