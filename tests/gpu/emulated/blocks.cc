// The threads of a block as fibers: each runs until it waits at a barrier or ends, and then another
// one is chosen at random.
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <vector>

#include "tests/gpu/emulated/cuda_runtime.h"

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace tandem::emulated {
namespace {

constexpr unsigned kWarp = 32;
constexpr size_t kStackBytes = 64 << 10, kPage = 4096;

enum class State { kReady, kAtWarpBarrier, kAtBlockBarrier, kEnded };

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack = std::make_unique<char[]>(kStackBytes);
  State state = State::kReady;
  uint64_t value = 0;  // that the warp exchanges
};

std::mutex one_launch;
std::mt19937_64 random_order;
std::vector<Fiber> fibers;
ucontext_t scheduler;
unsigned running;
const std::function<void()>* thread_body;

void Run() {
  (*thread_body)();
  fibers[running].state = State::kEnded;
}

void WaitAt(State barrier) {
  Fiber& self = fibers[running];
  self.state = barrier;
  swapcontext(&self.context, &scheduler);
}

// Releases the fibers [begin, end) if all that have not ended wait at `barrier`.
bool Release(unsigned begin, unsigned end, State barrier) {
  const auto first = fibers.begin() + begin, last = fibers.begin() + end;
  if (!std::any_of(first, last, [&](const Fiber& f) { return f.state == barrier; })) return false;
  if (!std::all_of(first, last, [&](const Fiber& f) {
        return f.state == barrier || f.state == State::kEnded;
      })) {
    return false;
  }
  for (auto fiber = first; fiber != last; ++fiber) {
    if (fiber->state == barrier) fiber->state = State::kReady;
  }
  return true;
}

bool ReleaseSome(unsigned threads) {
  bool released = Release(0, threads, State::kAtBlockBarrier);
  for (unsigned begin = 0; begin < threads; begin += kWarp) {
    released |= Release(begin, std::min(begin + kWarp, threads), State::kAtWarpBarrier);
  }
  return released;
}

void RunBlock(unsigned threads) {
  for (unsigned i = 0; i < threads; ++i) {
    Fiber& fiber = fibers[i];
    fiber.state = State::kReady;
    getcontext(&fiber.context);
    fiber.context.uc_stack = {.ss_sp = fiber.stack.get(), .ss_flags = 0, .ss_size = kStackBytes};
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, &Run, 0);
  }
  std::vector<unsigned> ready;
  while (true) {
    ready.clear();
    for (unsigned i = 0; i < threads; ++i) {
      if (fibers[i].state == State::kReady) ready.push_back(i);
    }
    if (ready.empty()) {
      if (ReleaseSome(threads)) continue;
      if (std::all_of(fibers.begin(), fibers.begin() + threads,
                      [](const Fiber& f) { return f.state == State::kEnded; })) {
        return;
      }
      std::fputs("emulated kernel: some threads wait at a barrier that others do not reach\n",
                 stderr);
      std::abort();
    }
    std::shuffle(ready.begin(), ready.end(), random_order);
    for (const unsigned next : ready) {
      running = next;
      threadIdx.x = next;
      swapcontext(&scheduler, &fibers[next].context);
    }
  }
}

}  // namespace

void SetSeed(uint64_t seed) {
  const std::lock_guard lock(one_launch);
  random_order.seed(seed);
}

void RunBlocks(unsigned blocks, unsigned threads, const std::function<void()>& thread) {
  const std::lock_guard lock(one_launch);
  if (fibers.size() < threads) fibers = std::vector<Fiber>(threads);
  thread_body = &thread;
  gridDim = {blocks, 1, 1};
  blockDim = {threads, 1, 1};
  std::vector<unsigned> order(blocks);
  for (unsigned i = 0; i < blocks; ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), random_order);
  for (const unsigned block : order) {
    blockIdx = {block, 0, 0};
    RunBlock(threads);
  }
}

uint64_t Exchange(uint64_t value, unsigned lane) {
  fibers[running].value = value;
  WaitAt(State::kAtWarpBarrier);
  const unsigned self = running;
  const uint64_t other = fibers[self / kWarp * kWarp + lane].value;
  // Nobody writes the next value before all have read this one.
  WaitAt(State::kAtWarpBarrier);
  return other;
}

}  // namespace tandem::emulated

// NOLINTNEXTLINE(bugprone-reserved-identifier)
void __syncthreads() { tandem::emulated::WaitAt(tandem::emulated::State::kAtBlockBarrier); }

namespace {

// The whole mapping of what cudaMalloc returned.
std::map<void*, std::pair<void*, size_t>>& Mappings() {
  static auto& mappings = *new std::map<void*, std::pair<void*, size_t>>;
  return mappings;
}
std::mutex mappings_mutex;

}  // namespace

cudaError_t cudaMalloc(void** data, size_t bytes) {
  using tandem::emulated::kPage;
  const size_t held = (bytes + kPage - 1) / kPage * kPage, mapped = held + kPage;
  void* const begin =
      mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (begin == MAP_FAILED) return cudaErrorMemoryAllocation;
  mprotect(static_cast<char*>(begin) + held, kPage, PROT_NONE);
  std::memset(begin, 0xFF, held);
  *data = static_cast<char*>(begin) + (held - bytes);
  const std::lock_guard lock(mappings_mutex);
  Mappings()[*data] = {begin, mapped};
  return cudaSuccess;
}

cudaError_t cudaFree(void* data) {
  const std::lock_guard lock(mappings_mutex);
  const auto found = Mappings().find(data);
  if (found == Mappings().end()) return cudaSuccess;
  munmap(found->second.first, found->second.second);
  Mappings().erase(found);
  return cudaSuccess;
}
