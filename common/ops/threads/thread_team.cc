#include "common/ops/threads/thread_team.h"

#include <chrono>
#include <utility>

namespace tandem::ops {
namespace {

// Longer than the calling thread's own work between two loops of a pass.
constexpr std::chrono::microseconds kSpin(100);
// Looks at the loop between two looks at the clock.
constexpr int kLooks = 64;

thread_local bool inside = false;  // whether this thread works for a team

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Returns whether `condition` held within kSpin. The clock of the standard library, because no
// moment leaves the function and a spin should do nothing else.
template <typename Condition>
bool SpinUntil(const Condition& condition) {
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < kLooks; ++i) {
      if (condition()) return true;
      Pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

}  // namespace

ThreadTeam& ThreadTeam::OfProcess() {
  static ThreadTeam& team = *new ThreadTeam;
  return team;
}

ThreadTeam::~ThreadTeam() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  wake_.notify_all();
  for (std::thread& member : members_) member.join();
}

void ThreadTeam::Run(int64_t parts, int threads, Work work) {
  std::unique_lock<std::mutex> caller;
  if (!inside && threads > 1 && parts > 1) caller = std::unique_lock(caller_, std::try_to_lock);
  if (!caller.owns_lock()) {
    for (int64_t part = 0; part < parts; ++part) work(part);
    return;
  }
  Start(threads - 1);
  work_ = &work;
  parts_ = parts;
  helpers_.store(threads - 1, std::memory_order_relaxed);
  unfinished_.store(parts, std::memory_order_relaxed);
  // Orders the loop before `sleeping_`: a member counts itself there before it looks at the loop.
  unbegun_.store(parts, std::memory_order_seq_cst);
  if (sleeping_.load(std::memory_order_seq_cst) > 0) {
    { const std::lock_guard lock(mutex_); }
    wake_.notify_all();
  }
  DoParts();
  const auto finished = [this] { return unfinished_.load(std::memory_order_acquire) == 0; };
  // A member that lost its core in the middle of a part needs it more than this thread does.
  while (!SpinUntil(finished)) std::this_thread::yield();
  std::exception_ptr exception;
  {
    const std::lock_guard lock(mutex_);
    exception = std::exchange(exception_, nullptr);
  }
  if (exception) std::rethrow_exception(exception);
}

void ThreadTeam::Start(int members) {
  while (static_cast<int>(members_.size()) < members) {
    members_.emplace_back([this, index = static_cast<int>(members_.size())] { Live(index); });
  }
}

void ThreadTeam::DoParts() {
  while (DoPart()) {
  }
}

bool ThreadTeam::DoPart() {
  int64_t unbegun = unbegun_.load(std::memory_order_acquire);
  do {
    if (unbegun == 0) return false;
  } while (!unbegun_.compare_exchange_weak(unbegun, unbegun - 1, std::memory_order_acq_rel));
  inside = true;
  try {
    (*work_)(parts_ - unbegun);
  } catch (...) {
    const std::lock_guard lock(mutex_);
    if (!exception_) exception_ = std::current_exception();
  }
  inside = false;
  unfinished_.fetch_sub(1, std::memory_order_release);
  return true;
}

void ThreadTeam::Live(int index) {
  const auto called = [&] {
    return unbegun_.load(std::memory_order_acquire) > 0 &&
           index < helpers_.load(std::memory_order_relaxed);
  };
  while (true) {
    if (SpinUntil(called)) {
      DoParts();
      continue;
    }
    std::unique_lock lock(mutex_);
    sleeping_.fetch_add(1, std::memory_order_seq_cst);
    wake_.wait(lock, [&] {
      return ends_ || (unbegun_.load(std::memory_order_seq_cst) > 0 &&
                       index < helpers_.load(std::memory_order_relaxed));
    });
    sleeping_.fetch_sub(1, std::memory_order_relaxed);
    if (ends_) return;
  }
}

}  // namespace tandem::ops
