// The threads of a block as fibers: each runs until it waits at a barrier or ends, and then another
// one is chosen at random.
#include <sys/mman.h>
#ifndef __x86_64__
#include <ucontext.h>
#endif

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

#ifdef __x86_64__
// Puts the registers that a call must not change on the stack, of which *from gets the place, and
// takes those of another stack. glibc's swapcontext would call the kernel twice.
extern "C" void tandem_emulated_switch(void** from, void* to);
asm(R"(
.text
.type tandem_emulated_switch, @function
tandem_emulated_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size tandem_emulated_switch, .-tandem_emulated_switch
)");
#endif

namespace tandem::emulated {
namespace {

constexpr unsigned kWarp = 32;
constexpr size_t kStackBytes = 64 << 10, kPage = 4096;

#ifdef __x86_64__
class Context {
 public:
  // The first switch here calls `run`, which does not return, on the stack.
  void Start(char* stack, void (*run)()) {
    auto** const top =
        reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(stack + kStackBytes) & ~uintptr_t{15});
    constexpr int kRegisters = 6;
    top[-1] = nullptr;  // nobody to return to
    top[-2] = reinterpret_cast<void*>(run);
    std::fill_n(top - 2 - kRegisters, kRegisters, nullptr);
    place_ = top - 2 - kRegisters;
  }
  void SwitchTo(const Context& other) { tandem_emulated_switch(&place_, other.place_); }

 private:
  void* place_ = nullptr;
};
#else
class Context {
 public:
  void Start(char* stack, void (*run)()) {
    getcontext(&context_);
    context_.uc_stack = {.ss_sp = stack, .ss_flags = 0, .ss_size = kStackBytes};
    context_.uc_link = nullptr;
    makecontext(&context_, run, 0);
  }
  void SwitchTo(const Context& other) { swapcontext(&context_, &other.context_); }

 private:
  ucontext_t context_;
};
#endif

enum class State { kReady, kAtWarpBarrier, kAtBlockBarrier, kEnded };

struct Fiber {
  Context context;
  std::unique_ptr<char[]> stack = std::make_unique<char[]>(kStackBytes);
  State state = State::kReady;
  uint64_t value = 0;  // that the warp exchanges
};

std::mutex one_launch;
std::mt19937_64 random_order;
bool at_end = true;
std::vector<Fiber> fibers;
Context scheduler;
unsigned running;
const std::function<void()>* thread_body;

void WaitAt(State barrier) {
  Fiber& self = fibers[running];
  self.state = barrier;
  self.context.SwitchTo(scheduler);
}

void Run() {
  (*thread_body)();
  WaitAt(State::kEnded);
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
    fiber.context.Start(fiber.stack.get(), &Run);
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
      scheduler.SwitchTo(fibers[next].context);
    }
  }
}

}  // namespace

void SetSeed(uint64_t seed) {
  const std::lock_guard lock(one_launch);
  random_order.seed(seed);
  at_end = seed % 2 == 0;
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

namespace tandem::emulated {
namespace {

// The whole mapping of what AllocateFenced returned.
std::map<void*, std::pair<void*, size_t>>& Mappings() {
  static auto& mappings = *new std::map<void*, std::pair<void*, size_t>>;
  return mappings;
}
std::mutex mappings_mutex;

}  // namespace

void* AllocateFenced(size_t bytes, bool at_end) {
  const size_t held = (bytes + kPage - 1) / kPage * kPage, mapped = held + 2 * kPage;
  void* const begin = mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (begin == MAP_FAILED) return nullptr;
  char* const first = static_cast<char*>(begin) + kPage;
  if (held > 0 && mprotect(first, held, PROT_READ | PROT_WRITE) != 0) std::abort();
  std::memset(first, 0xFF, held);
  char* const memory = at_end ? first + (held - bytes) : first;
  const std::lock_guard lock(mappings_mutex);
  Mappings()[memory] = {begin, mapped};
  return memory;
}

void FreeFenced(void* memory) {
  const std::lock_guard lock(mappings_mutex);
  const auto found = Mappings().find(memory);
  if (found == Mappings().end()) return;
  munmap(found->second.first, found->second.second);
  Mappings().erase(found);
}

}  // namespace tandem::emulated

cudaError_t cudaMalloc(void** data, size_t bytes) {
  *data = tandem::emulated::AllocateFenced(bytes, tandem::emulated::at_end);
  return *data == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}

cudaError_t cudaFree(void* data) {
  tandem::emulated::FreeFenced(data);
  return cudaSuccess;
}
