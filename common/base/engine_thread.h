// The one thread that owns the models of a server.
//
//   EngineThread thread({.name = "trainer", .around = [](absl::FunctionRef<void()> loop) {
//     at::set_num_threads(4);  // settings of the thread, and guards that live as long as it
//     loop();
//   }});
//   absl::StatusOr<Report> report = thread.Run(call, [&] { return Step(request); });
//
// Everything that touches a model or its state is a command or a step of this thread, so it needs
// no lock, and there is one OpenMP pool.
#ifndef TANDEM_COMMON_BASE_ENGINE_THREAD_H_
#define TANDEM_COMMON_BASE_ENGINE_THREAD_H_

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/base/call_scope.h"
#include "common/base/errors/catch_exceptions.h"
#include "common/base/steady_time.h"

namespace tandem {

struct EngineThreadOptions {
  std::string name = "engine";  // in messages
  size_t inbox_capacity = 1 << 16;
  // Stall limit: Health fails when work waits or runs and nothing progressed for this long. It
  // exceeds the longest forward pass that a small machine may need.
  absl::Duration stall_limit = absl::Seconds(120);
  std::function<SteadyTime()> clock = SteadyTime::Now;

  // Functions that run on the engine thread; each may be empty.

  // Calls `loop` once: what it does before and after is the thread's set-up and end.
  std::function<void(absl::FunctionRef<void()> loop)> around = nullptr;
  // One step, between commands. Returns when it wants to run again: InfinitePast at once,
  // InfiniteFuture not before another command has run. Calls NoteProgress when it did something.
  std::function<SteadyTime()> step = nullptr;
  // A step threw. The next one comes after a short rest, unless a command is first.
  std::function<void(const absl::Status& error)> step_failed = nullptr;
};

// Thread-safe.
class EngineThread {
 public:
  explicit EngineThread(EngineThreadOptions options);
  ~EngineThread() { Shutdown(); }
  EngineThread(const EngineThread&) = delete;
  EngineThread& operator=(const EngineThread&) = delete;

  // Runs `body`, which returns a Status or StatusOr, in its turn and waits for it. A call that is
  // cancelled, or whose deadline passes, while it is queued leaves at once and its body never runs:
  // CANCELLED, DEADLINE_EXCEEDED. RESOURCE_EXHAUSTED when the inbox is full, UNAVAILABLE after
  // Shutdown. An exception of `body` becomes a Status. Not from the engine thread itself.
  template <typename Body>
  auto Run(const CallScope& call, Body&& body) -> std::invoke_result_t<Body&> {
    std::optional<std::invoke_result_t<Body&>> result;
    absl::Status ran =
        RunInTurn(call, [&] { result.emplace(CatchExceptions(options_.name, body)); });
    if (!result.has_value()) return ran;
    return *std::move(result);
  }

  // Queues `work` and returns. What was accepted runs, even when Shutdown follows.
  // RESOURCE_EXHAUSTED, UNAVAILABLE as above.
  absl::Status Post(std::function<void()> work);

  // Work advances: called by long bodies and by steps, from any thread. A finished command counts
  // by itself, and so does what calls tandem::NoteProgress (progress.h) on the engine thread: every
  // transfer between a file and memory.
  void NoteProgress();
  // Another process, for which work waits here, has advanced. ProgressCount does not count it.
  void NoteProgressOfOthers();
  // The last progress; InfinitePast before the first.
  SteadyTime last_progress() const;

  // UNAVAILABLE when work waits or runs and nothing progressed for the stall limit. Never waits.
  absl::Status Health() const;

  // Queued calls of Run get UNAVAILABLE; returns when the thread has ended.
  void Shutdown();

 private:
  struct Command {
    const CallScope* call = nullptr;  // null when nobody waits
    std::function<void()> body;
    bool started = false;
    bool done = false;
    absl::Status status;  // why the body did not run, or not to its end
    std::condition_variable_any changed;
  };

  absl::Status RunInTurn(const CallScope& call, absl::FunctionRef<void()> body);
  absl::Status Enqueue(std::shared_ptr<Command> command);  // with mutex_ held
  void Loop();
  void WaitForWork(std::unique_lock<std::mutex>& lock);
  void RunCommand(std::unique_lock<std::mutex>& lock);
  void RunStep(std::unique_lock<std::mutex>& lock);
  absl::Status ShutDownStatus() const;

  const EngineThreadOptions options_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::shared_ptr<Command>> inbox_;
  bool stopping_ = false;
  SteadyTime next_step_ = SteadyTime::InfiniteFuture();
  SteadyTime busy_since_ = SteadyTime::InfiniteFuture();  // infinite while there is nothing to do
  SteadyTime last_progress_ = SteadyTime::InfinitePast();
  std::once_flag joined_;
  std::thread thread_;  // last: it uses everything above
};

}  // namespace tandem

#endif  // TANDEM_COMMON_BASE_ENGINE_THREAD_H_
