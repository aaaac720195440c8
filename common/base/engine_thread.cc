#include "common/base/engine_thread.h"

#include <pthread.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/logging.h"
#include "common/base/progress.h"
#include "common/base/steady_time.h"

namespace tandem {
namespace {

constexpr int64_t kFullRetryMilliseconds = 500;
// Keeps a step that always fails from taking a core for itself.
constexpr absl::Duration kRestAfterFailure = absl::Milliseconds(100);
// Longest name of a thread in the kernel, without the NUL byte.
constexpr size_t kMaxThreadName = 15;

}  // namespace

EngineThread::EngineThread(EngineThreadOptions options)
    : options_(std::move(options)), thread_([this] {
        pthread_setname_np(pthread_self(), options_.name.substr(0, kMaxThreadName).c_str());
        if (options_.around) {
          options_.around([this] { Loop(); });
        } else {
          Loop();
        }
      }) {}

absl::Status EngineThread::ShutDownStatus() const {
  return absl::UnavailableError(absl::StrCat(options_.name, ": the engine is shut down"));
}

absl::Status EngineThread::Enqueue(std::shared_ptr<Command> command) {
  if (stopping_) return ShutDownStatus();
  if (inbox_.size() >= options_.inbox_capacity) {
    return WithRetryAfter(
        absl::ResourceExhaustedError(absl::StrCat(options_.name, ": ", inbox_.size(),
                                                  " commands are waiting for the engine")),
        kFullRetryMilliseconds);
  }
  inbox_.push_back(std::move(command));
  if (busy_since_ == SteadyTime::InfiniteFuture()) busy_since_ = options_.clock();
  wake_.notify_one();
  return absl::OkStatus();
}

absl::Status EngineThread::Post(std::function<void()> work) {
  auto command = std::make_shared<Command>();
  command->body = std::move(work);
  const std::lock_guard lock(mutex_);
  return Enqueue(std::move(command));
}

absl::Status EngineThread::RunInTurn(const CallScope& call, absl::FunctionRef<void()> body) {
  const auto command = std::make_shared<Command>();
  command->call = &call;
  command->body = [body] { body(); };
  std::unique_lock lock(mutex_);
  if (absl::Status queued = Enqueue(command); !queued.ok()) return queued;
  const auto settled = [&] { return command->started || command->done || stopping_; };
  absl::Status left;
  while (left.ok() && !settled()) {
    command->changed.wait_until(lock, call.cancellation, call.deadline.ToChrono(), settled);
    left = stopping_ ? ShutDownStatus() : call.Check();
  }
  if (!command->started && !command->done) {
    std::erase(inbox_, command);
    return left;
  }
  command->changed.wait(lock, [&] { return command->done; });
  return command->status;
}

void EngineThread::NoteProgress() {
  CountProgress();
  NoteProgressOfOthers();
}

void EngineThread::NoteProgressOfOthers() {
  const std::lock_guard lock(mutex_);
  last_progress_ = options_.clock();
}

SteadyTime EngineThread::last_progress() const {
  const std::lock_guard lock(mutex_);
  return last_progress_;
}

absl::Status EngineThread::Health() const {
  const std::lock_guard lock(mutex_);
  if (busy_since_ == SteadyTime::InfiniteFuture()) return absl::OkStatus();
  const absl::Duration still = options_.clock() - std::max(busy_since_, last_progress_);
  if (still < options_.stall_limit) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat(options_.name,
                                             ": work is waiting, but nothing has progressed for ",
                                             absl::ToInt64Seconds(still), " s"));
}

void EngineThread::Shutdown() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    wake_.notify_one();
    for (const auto& command : inbox_) command->changed.notify_all();
  }
  std::call_once(joined_, [this] { thread_.join(); });
}

void EngineThread::WaitForWork(std::unique_lock<std::mutex>& lock) {
  const auto ready = [&] { return stopping_ || !inbox_.empty() || next_step_ <= options_.clock(); };
  if (ready()) return;
  busy_since_ = SteadyTime::InfiniteFuture();
  while (!ready()) {
    wake_.wait_for(
        lock, absl::ToChronoNanoseconds(std::min(next_step_ - options_.clock(), absl::Hours(1))));
  }
  if (busy_since_ == SteadyTime::InfiniteFuture()) busy_since_ = options_.clock();
}

void EngineThread::Loop() {
  const ProgressScope progress([this] { NoteProgressOfOthers(); });
  if (options_.step) next_step_ = SteadyTime::InfinitePast();
  std::unique_lock lock(mutex_);
  for (;;) {
    WaitForWork(lock);
    // Commands that arrive meanwhile wait for the next round, so that steps get their turn.
    for (size_t waiting = inbox_.size(); waiting > 0 && !inbox_.empty(); --waiting) {
      RunCommand(lock);
    }
    if (stopping_) {
      if (inbox_.empty()) return;
    } else if (next_step_ <= options_.clock()) {
      RunStep(lock);
    }
  }
}

void EngineThread::RunCommand(std::unique_lock<std::mutex>& lock) {
  const std::shared_ptr<Command> command = std::move(inbox_.front());
  inbox_.pop_front();
  const CallScope* const call = command->call;
  if (call != nullptr) command->status = stopping_ ? ShutDownStatus() : call->Check();
  const bool runs = command->status.ok();
  command->started = runs;
  lock.unlock();
  if (runs) {
    const ScopedCallLog call_log(call == nullptr ? CallScope{} : *call);
    const absl::Status status = CatchExceptions(options_.name, [&] {
      command->body();
      return absl::OkStatus();
    });
    if (!status.ok()) {  // nearly always of posted work: Run catches what its body throws
      Log(LogLevel::kError, "engine_command_failed", {{"error", status.ToString()}});
    }
    command->status = status;
  }
  command->body = nullptr;  // without the lock: a destructor may call this thread
  lock.lock();
  if (runs) {
    CountProgress();
    last_progress_ = options_.clock();
    if (options_.step) next_step_ = SteadyTime::InfinitePast();  // there may be something to do now
  }
  command->done = true;
  command->changed.notify_all();
}

void EngineThread::RunStep(std::unique_lock<std::mutex>& lock) {
  lock.unlock();
  SteadyTime next = SteadyTime::InfinitePast();
  const absl::Status status = CatchExceptions(options_.name, [&] {
    next = options_.step();
    return absl::OkStatus();
  });
  if (!status.ok()) {
    Log(LogLevel::kError, "engine_step_failed", {{"error", status.ToString()}});
    if (options_.step_failed) {
      const absl::Status told = CatchExceptions(options_.name, [&] {
        options_.step_failed(status);
        return absl::OkStatus();
      });
      if (!told.ok()) {
        Log(LogLevel::kError, "engine_step_failed", {{"error", told.ToString()}});
      }
    }
    next = options_.clock() + kRestAfterFailure;
  }
  lock.lock();
  next_step_ = next;
}

}  // namespace tandem
