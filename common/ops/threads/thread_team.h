// Threads that divide the short loops of a forward pass.
#ifndef TANDEM_COMMON_OPS_THREADS_THREAD_TEAM_H_
#define TANDEM_COMMON_OPS_THREADS_THREAD_TEAM_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"

namespace tandem::ops {

// Threads that work on one loop at a time, and spin between two loops. A pass divides hundreds of
// loops of some microseconds each. OpenMP's threads sleep between two of them as soon as the
// process has more threads than cores, and waking one takes longer than such a loop, above all on a
// virtual machine. A member of this team first spins, for as long as the time between two loops,
// and then sleeps. Whoever is free takes the next part of a loop: a member whose core another
// process has holds up nobody, unless it lost the core in the middle of a part.
class ThreadTeam {
 public:
  ThreadTeam() = default;
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;
  // No loop may run.
  ~ThreadTeam();

  // The team of the process. Never destroyed: threads may still run at the exit.
  static ThreadTeam& OfProcess();

  // Calls work(part) for all parts of [0, parts), on the calling thread and up to `threads` - 1
  // members, which are started when they are first needed. The calling thread does all of it alone
  // while the team works for another thread, and inside `work`. An exception of `work` is rethrown
  // when no part runs any more.
  void Run(int64_t parts, int threads, absl::FunctionRef<void(int64_t part)> work);

 private:
  using Work = absl::FunctionRef<void(int64_t)>;

  void Live(int index);
  // Does parts of the loop until nobody has to begin one.
  void DoParts();
  // Returns false if there was no part to begin.
  bool DoPart();
  void Start(int members);

  std::mutex caller_;  // held by the thread that the team works for

  // The loop. `unbegun_` counts its parts down: whoever lowers it may read the other fields, which
  // change only when every part is done.
  alignas(64) std::atomic<int64_t> unbegun_ = 0;
  alignas(64) std::atomic<int64_t> unfinished_ = 0;
  std::atomic<int> helpers_ = 0;  // members that may take part
  const Work* work_ = nullptr;
  int64_t parts_ = 0;

  std::mutex mutex_;  // guards what follows
  std::condition_variable wake_;
  std::exception_ptr exception_;
  bool ends_ = false;
  std::atomic<int> sleeping_ = 0;  // changed with the mutex

  std::vector<std::thread> members_;  // changed by the holder of caller_
};

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_THREADS_THREAD_TEAM_H_
