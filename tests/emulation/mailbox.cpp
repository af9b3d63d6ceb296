// What is sent to a mailbox arrives at once, or, in the other order, as late as it can: when no
// thread can go on without it.
#include "mailbox.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "threads.h"

namespace emulation {
namespace {

constexpr size_t kBarrierBytes = sizeof(uint64_t);
constexpr uint64_t kMark = 0x4d61696c626f7821;  // in a barrier, until something overwrites it
constexpr int kMostBytes = (1 << 20) - 1;       // that an mbarrier can count

size_t offset_in_shared(const void* address, size_t size) {
  const GuardedMemory& shared = *current->block->shared;
  const auto* first = static_cast<const std::byte*>(address);
  if (!shared.contains(first) || !shared.contains(first + size - 1))
    complain(" has a mailbox or a slot outside of its dynamic shared memory");
  const size_t offset = first - shared.data();
  if (offset % size != 0) complain(" has a mailbox or a slot that is not aligned to its size");
  return offset;
}

bool is_overwritten(const Block& block, size_t offset) {
  return std::memcmp(block.shared->data() + offset, &kMark, kBarrierBytes) != 0;
}

Mailbox& find(Block& block, size_t offset) {
  const auto found = block.mailboxes.at.find(offset);
  if (found == block.mailboxes.at.end() || current->waits < found->second.waits_needed)
    complain(" uses a mailbox before a cluster barrier that follows its init()");
  if (is_overwritten(block, offset)) complain(" uses a mailbox that has been overwritten");
  return found->second;
}

bool everybody_has_waited(const Mailbox& mailbox, unsigned round) {
  return std::all_of(mailbox.waits.begin(), mailbox.waits.end(),
                     [=](unsigned waits) { return waits > round; });
}

// What lies in a slot must have been there to read for every thread before the next comes.
void note_sender(Mailboxes& mailboxes, size_t slot, size_t size, Mailboxes::Sender sender) {
  for (size_t word = slot; word < slot + size; word += 4) {
    const auto last = mailboxes.last_sender.find(word);
    if (last != mailboxes.last_sender.end() &&
        !everybody_has_waited(mailboxes.at.at(last->second.mailbox), last->second.round))
      complain(" sends to a slot before every thread there has waited for its last value");
    mailboxes.last_sender[word] = sender;
  }
}

bool is_complete(const Mailbox& mailbox) {
  return mailbox.expects && mailbox.arrived == mailbox.expected;
}

void complete(Block& block, size_t offset) {
  Mailbox& mailbox = block.mailboxes.at.at(offset);
  for (const Letter& letter : mailbox.letters)
    std::memcpy(letter.slot, letter.value.data(), letter.size);
  mailbox.letters.clear();
  mailbox.expects = false;
  mailbox.arrived = mailbox.expected = 0;
  ++mailbox.rounds;
  mailbox.waits_left += block.threads.size();
  for (const auto& thread : block.threads) {
    if (thread->wait == Wait::kMailbox && thread->mailbox == offset) thread->wait = Wait::kNothing;
  }
}

// After an expect() or a send().
void update(Block& block, size_t offset) {
  const Mailbox& mailbox = block.mailboxes.at.at(offset);
  if (mailbox.expects && mailbox.arrived > mailbox.expected)
    complain(" leaves a mailbox with more bytes than it expects");
  if (reversed && is_complete(mailbox)) complete(block, offset);
}

}  // namespace

void mailbox_init(uint64_t* barrier) {
  Block& block = *current->block;
  const size_t offset = offset_in_shared(barrier, kBarrierBytes);
  const auto [entry, is_new] = block.mailboxes.at.try_emplace(offset);
  if (!is_new) complain(" initializes a mailbox twice");
  entry->second.waits_needed = current->arrivals + 1;
  entry->second.waits.resize(block.threads.size());
  *barrier = kMark;
}

void mailbox_expect(uint64_t* barrier, int bytes) {
  const size_t offset = offset_in_shared(barrier, kBarrierBytes);
  Mailbox& mailbox = find(*current->block, offset);
  if (mailbox.expects) complain(" expects the bytes of a round twice");
  if (bytes <= 0 || bytes > kMostBytes) complain(" expects less than one byte or more than 2^20");
  mailbox.expects = true;
  mailbox.expected = bytes;
  update(*current->block, offset);
}

void mailbox_send(void* slot, uint64_t* barrier, unsigned rank, const void* value, size_t size) {
  const size_t slot_offset = offset_in_shared(slot, size);
  const size_t offset = offset_in_shared(barrier, kBarrierBytes);
  if (cluster.blocks.size() == 1) complain(" sends in a launch without clusters");
  if (rank >= cluster.blocks.size()) complain(" sends to a block that its cluster does not have");
  Block& block = *cluster.blocks[rank];
  const auto ended = [](const auto& thread) { return thread->wait == Wait::kEnd; };
  if (std::all_of(block.threads.begin(), block.threads.end(), ended))
    complain(" sends to a block that has ended");
  Mailbox& mailbox = find(block, offset);
  // Such a thread might find that the next round is over as well, and wait for one that never ends.
  if (mailbox.waits_left > 0)
    complain(" sends for a mailbox's next round before every thread there has waited for the last");
  note_sender(block.mailboxes, slot_offset, size, {offset, mailbox.rounds});
  Letter letter = {block.shared->data() + slot_offset, {}, size};
  std::memcpy(letter.value.data(), value, size);
  if (reversed) {
    std::memcpy(letter.slot, value, size);
  } else {
    mailbox.letters.push_back(letter);
  }
  mailbox.arrived += size;
  update(block, offset);
}

void mailbox_wait(uint64_t* barrier, unsigned parity) {
  const size_t offset = offset_in_shared(barrier, kBarrierBytes);
  Mailbox& mailbox = find(*current->block, offset);
  unsigned& waits = mailbox.waits[current->number];
  if (parity != waits % 2) complain(" waits for a mailbox with the parity of another round");
  current->mailbox = offset;
  if (mailbox.rounds == waits) suspend(Wait::kMailbox, current->line);
  ++waits;
  --mailbox.waits_left;
}

bool deliver_mail() {
  bool any = false;
  for (const auto& block : cluster.blocks) {
    for (const auto& [offset, mailbox] : block->mailboxes.at) {
      if (!is_complete(mailbox)) continue;
      complete(*block, offset);
      any = true;
    }
  }
  return any;
}

const char* find_mail_error(const Block& block) {
  for (const auto& [offset, mailbox] : block.mailboxes.at) {
    if (is_overwritten(block, offset)) return "the threads overwrote a mailbox";
    if (mailbox.expects || mailbox.arrived > 0)
      return "the threads end while values are on their way to their mailbox";
    if (mailbox.waits_left > 0) return "not every thread waited for its mailbox";
  }
  return nullptr;
}

std::string describe_mail(const Thread& thread) {
  const Mailbox& mailbox = thread.block->mailboxes.at.at(thread.mailbox);
  const std::string which = "its mailbox at byte " + std::to_string(thread.mailbox);
  const std::string arrived = std::to_string(mailbox.arrived);
  if (!mailbox.expects) return which + ", where " + arrived + " bytes arrived that nobody expects";
  return which + ", where " + arrived + " of " + std::to_string(mailbox.expected) +
         " bytes arrived";
}

}  // namespace emulation
