#include "common/base/engine_thread.h"

#include <gtest/gtest.h>
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <future>
#include <latch>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "common/base/files/file_descriptor.h"
#include "common/base/progress.h"
#include "common/base/steady_time.h"

namespace tandem {
namespace {

using Code = absl::StatusCode;

// Holds the thread inside a command until it is let go.
class Blocker {
 public:
  explicit Blocker(EngineThread& thread) {
    EXPECT_TRUE(thread
                    .Post([state = state_] {
                      state->entered.count_down();
                      state->go.wait();
                    })
                    .ok());
    state_->entered.wait();
  }
  ~Blocker() { Release(); }
  void Release() {
    if (!state_->go.try_wait()) state_->go.count_down();
  }

 private:
  struct State {
    std::latch entered{1}, go{1};
  };
  const std::shared_ptr<State> state_ = std::make_shared<State>();  // the command may outlive this
};

absl::Status Nothing() { return absl::OkStatus(); }

TEST(EngineThreadTest, RunsCommandsInOrderOnOneThread) {
  EngineThread thread({});
  std::vector<int> order;
  std::vector<std::thread::id> ids;
  {
    Blocker blocker(thread);
    for (int i = 0; i < 5; ++i) {
      ASSERT_TRUE(thread
                      .Post([&, i] {
                        order.push_back(i);
                        ids.push_back(std::this_thread::get_id());
                      })
                      .ok());
    }
  }
  const absl::StatusOr<int> answer = thread.Run({}, [&]() -> absl::StatusOr<int> {
    ids.push_back(std::this_thread::get_id());
    return 42;
  });
  EXPECT_EQ(answer.value(), 42);
  EXPECT_EQ(order, (std::vector<int>{0, 1, 2, 3, 4}));
  for (const std::thread::id id : ids) {
    EXPECT_EQ(id, ids[0]);
    EXPECT_NE(id, std::this_thread::get_id());
  }
}

TEST(EngineThreadTest, ACallWhoseDeadlinePassesInTheQueueLeavesAndNeverRuns) {
  EngineThread thread({});
  Blocker blocker(thread);
  bool ran = false;
  CallScope call;
  call.deadline = SteadyTime::Now() + absl::Milliseconds(20);
  const absl::Status status = thread.Run(call, [&] {
    ran = true;
    return absl::OkStatus();
  });
  EXPECT_EQ(status.code(), Code::kDeadlineExceeded);  // while the thread is still blocked
  blocker.Release();
  EXPECT_TRUE(thread.Run({}, Nothing).ok());
  EXPECT_FALSE(ran);
}

TEST(EngineThreadTest, ACancelledCallLeavesTheQueueAndNeverRuns) {
  EngineThread thread({});
  Blocker blocker(thread);
  bool ran = false;
  std::stop_source caller;
  auto status = std::async(std::launch::async, [&] {
    CallScope call;
    call.cancellation = caller.get_token();
    return thread.Run(call, [&] {
      ran = true;
      return absl::OkStatus();
    });
  });
  caller.request_stop();
  EXPECT_EQ(status.get().code(), Code::kCancelled);  // while the thread is still blocked
  blocker.Release();
  EXPECT_TRUE(thread.Run({}, Nothing).ok());
  EXPECT_FALSE(ran);
}

TEST(EngineThreadTest, ACallThatHasBegunIsWaitedFor) {
  EngineThread thread({});
  std::stop_source caller;
  CallScope call;
  call.cancellation = caller.get_token();
  bool finished = false;
  const absl::Status status = thread.Run(call, [&] {
    caller.request_stop();
    EXPECT_EQ(call.Check().code(), Code::kCancelled);
    finished = true;
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok());
  EXPECT_TRUE(finished);
}

TEST(EngineThreadTest, ExceptionsBecomeStatusesAndTheThreadLivesOn) {
  EngineThread thread({.name = "trainer"});
  const absl::Status failed =
      thread.Run({}, []() -> absl::Status { throw std::runtime_error("broken tensor"); });
  EXPECT_EQ(failed.code(), Code::kInternal);
  EXPECT_EQ(failed.message(), "trainer: broken tensor");
  EXPECT_EQ(thread.Run({}, []() -> absl::Status { throw std::bad_alloc(); }).code(),
            Code::kResourceExhausted);
  EXPECT_EQ(thread.Run({}, []() -> absl::Status { throw 3; }).code(), Code::kInternal);
  EXPECT_TRUE(thread.Post([] { throw std::runtime_error("posted"); }).ok());
  EXPECT_TRUE(thread.Run({}, Nothing).ok());
}

TEST(EngineThreadTest, ShutdownReleasesWaitingCallersAndRunsPostedWork) {
  EngineThread thread({});
  bool posted = false, ran = false;
  auto blocker = std::make_unique<Blocker>(thread);
  ASSERT_TRUE(thread.Post([&] { posted = true; }).ok());
  auto status = std::async(std::launch::async, [&] {
    return thread.Run({}, [&] {
      ran = true;
      return absl::OkStatus();
    });
  });
  auto down = std::async(std::launch::async, [&] { thread.Shutdown(); });
  EXPECT_EQ(status.get().code(), Code::kUnavailable);  // while the thread is still blocked
  blocker.reset();
  down.get();
  EXPECT_TRUE(posted);
  EXPECT_FALSE(ran);
  EXPECT_EQ(thread.Run({}, Nothing).code(), Code::kUnavailable);
  EXPECT_EQ(thread.Post([] {}).code(), Code::kUnavailable);
}

TEST(EngineThreadTest, AFullInboxRefuses) {
  EngineThread thread({.inbox_capacity = 1});
  Blocker blocker(thread);
  ASSERT_TRUE(thread.Post([] {}).ok());
  EXPECT_EQ(thread.Post([] {}).code(), Code::kResourceExhausted);
  EXPECT_EQ(thread.Run({}, Nothing).code(), Code::kResourceExhausted);
}

TEST(EngineThreadTest, AroundHoldsTheWholeLoop) {
  std::vector<const char*> events;
  {
    EngineThread thread({.around = [&](absl::FunctionRef<void()> loop) {
      events.push_back("before");
      loop();
      events.push_back("after");
    }});
    EXPECT_TRUE(thread
                    .Run({},
                         [&] {
                           events.push_back("command");
                           return absl::OkStatus();
                         })
                    .ok());
  }
  EXPECT_EQ(events, (std::vector<const char*>{"before", "command", "after"}));
}

TEST(EngineThreadTest, StepsRunWhileThereIsWorkAndCommandsComeBetweenThem) {
  int work = 0;
  std::vector<const char*> events;
  std::latch done(1);
  EngineThread* self = nullptr;
  EngineThread thread({.step = [&] {
    if (work == 0) return SteadyTime::InfiniteFuture();
    events.push_back("step");
    if (work == 3) self->Post([&] { events.push_back("command"); }).IgnoreError();
    if (--work == 0) done.count_down();
    return SteadyTime::InfinitePast();
  }});
  self = &thread;
  ASSERT_TRUE(thread.Post([&] { work = 3; }).ok());
  done.wait();
  EXPECT_EQ(events, (std::vector<const char*>{"step", "command", "step", "step"}));
}

TEST(EngineThreadTest, AStepMayAskForALaterTime) {
  std::latch second(1);
  std::vector<SteadyTime> began;
  const absl::Duration wait = absl::Milliseconds(50);
  EngineThread thread({.step = [&] {
    began.push_back(SteadyTime::Now());
    if (began.size() == 2) second.count_down();
    return began.size() < 2 ? SteadyTime::Now() + wait : SteadyTime::InfiniteFuture();
  }});
  second.wait();
  EXPECT_GE(began[1], began[0] + wait);
}

TEST(EngineThreadTest, AFailingStepIsReportedAndDoesNotSpin) {
  std::atomic<int> steps = 0;
  std::atomic<int> failures = 0;
  EngineThread thread({.step = [&]() -> SteadyTime {
                         ++steps;
                         throw std::runtime_error("bad step");
                       },
                       .step_failed =
                           [&](const absl::Status& error) {
                             EXPECT_EQ(error.code(), Code::kInternal);
                             ++failures;
                           }});
  while (steps < 3) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_TRUE(thread.Run({}, Nothing).ok());
  thread.Shutdown();
  EXPECT_EQ(steps, failures);
  EXPECT_LT(steps, 1000);
}

TEST(EngineThreadTest, AFailureWhileAFailureIsToldDoesNotEndTheThread) {
  std::atomic<int> told = 0;
  EngineThread thread({.step = [&]() -> SteadyTime { throw std::runtime_error("bad step"); },
                       .step_failed =
                           [&](const absl::Status&) {
                             ++told;
                             throw std::runtime_error("bad listener");
                           }});
  while (told < 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_TRUE(thread.Run({}, Nothing).ok());
}

TEST(EngineThreadTest, TheThreadHasItsName) {
  EngineThread thread({.name = "rollout engine two"});
  const absl::StatusOr<std::string> name = thread.Run({}, []() -> absl::StatusOr<std::string> {
    char text[16];
    pthread_getname_np(pthread_self(), text, sizeof(text));
    return text;
  });
  EXPECT_EQ(name.value(), "rollout engine ");
}

TEST(EngineThreadTest, HealthFailsWhenNothingProgressesWhileWorkWaits) {
  std::atomic<int64_t> seconds = 0;
  EngineThread thread({.stall_limit = absl::Seconds(10), .clock = [&] {
                         return SteadyTime() + absl::Seconds(1000 + seconds.load());
                       }});
  EXPECT_TRUE(thread.Run({}, Nothing).ok());
  seconds += 100;
  EXPECT_TRUE(thread.Health().ok()) << "an idle engine is healthy";
  {
    Blocker blocker(thread);
    EXPECT_TRUE(thread.Health().ok());
    seconds += 9;
    EXPECT_TRUE(thread.Health().ok());
    thread.NoteProgress();
    seconds += 9;
    EXPECT_TRUE(thread.Health().ok()) << "it moved in between";
    seconds += 1;
    EXPECT_EQ(thread.Health().code(), Code::kUnavailable);
    ASSERT_TRUE(thread.Post([] {}).ok());
    EXPECT_EQ(thread.Health().code(), Code::kUnavailable) << "new work does not hide the stall";
  }
  EXPECT_TRUE(thread.Run({}, Nothing).ok());
  EXPECT_TRUE(thread.Health().ok());
}

// A save to a slow disk takes longer than the stall limit, and is healthy all the while.
TEST(EngineThreadTest, TransfersOfFilesAreProgress) {
  std::atomic<int64_t> seconds = 0;
  EngineThread thread({.stall_limit = absl::Seconds(10), .clock = [&] {
                         return SteadyTime() + absl::Seconds(1000 + seconds.load());
                       }});
  const int64_t counted = ProgressCount();
  const absl::Status saved = thread.Run({}, [&]() -> absl::Status {
    for (int transfer = 0; transfer < 20; ++transfer) {
      seconds += 9;
      NoteTransfer(Transfer::kWrite, 1);
      if (absl::Status health = thread.Health(); !health.ok()) return health;
    }
    seconds += 10;
    return thread.Health().ok() ? absl::InternalError("a stall is healthy") : absl::OkStatus();
  });
  EXPECT_TRUE(saved.ok()) << saved;
  EXPECT_GE(ProgressCount(), counted + 20);
}

// What waits for another process is healthy while that process advances.
TEST(EngineThreadTest, ProgressOfOthersIsProgressThatIsNotCounted) {
  std::atomic<int64_t> seconds = 0;
  EngineThread thread({.stall_limit = absl::Seconds(10), .clock = [&] {
                         return SteadyTime() + absl::Seconds(1000 + seconds.load());
                       }});
  const Blocker blocker(thread);
  seconds += 10;
  EXPECT_FALSE(thread.Health().ok());
  const int64_t counted = ProgressCount();
  thread.NoteProgressOfOthers();
  EXPECT_TRUE(thread.Health().ok());
  EXPECT_EQ(ProgressCount(), counted);
}

TEST(EngineThreadTest, HealthFailsForStepsThatNeverProgress) {
  std::atomic<int64_t> seconds = 0;
  std::atomic<bool> move = false;
  EngineThread* self = nullptr;
  std::latch ready(1);
  EngineThread thread({.stall_limit = absl::Seconds(10),
                       .clock = [&] { return SteadyTime() + absl::Seconds(seconds.load()); },
                       .step =
                           [&] {
                             ready.wait();
                             if (move) self->NoteProgress();
                             std::this_thread::yield();
                             return SteadyTime::InfinitePast();
                           }});
  self = &thread;
  ready.count_down();
  EXPECT_TRUE(thread.Run({}, Nothing).ok());
  seconds = 10;
  EXPECT_FALSE(thread.Health().ok());
  move = true;
  while (!thread.Health().ok()) std::this_thread::yield();
}

// Every call either ran once and returned its own result, or did not run and says why.
TEST(EngineThreadTest, HoldsUnderLoad) {
  EngineThread thread({});
  std::atomic<int> ran = 0, ok = 0;
  std::vector<std::thread> callers;
  for (int c = 0; c < 8; ++c) {
    callers.emplace_back([&, c] {
      for (int i = 0; i < 200; ++i) {
        std::stop_source source;
        CallScope call;
        call.cancellation = source.get_token();
        if (i % 3 == 0) call.deadline = SteadyTime::Now() + absl::Microseconds(20);
        std::thread canceller;
        if (i % 20 == 0) canceller = std::thread([&] { source.request_stop(); });
        const absl::StatusOr<int> result = thread.Run(call, [&]() -> absl::StatusOr<int> {
          ++ran;
          return c * 1000 + i;
        });
        if (canceller.joinable()) canceller.join();
        if (result.ok()) {
          ++ok;
          EXPECT_EQ(*result, c * 1000 + i);
        } else {
          EXPECT_TRUE(result.status().code() == Code::kDeadlineExceeded ||
                      result.status().code() == Code::kCancelled)
              << result.status();
        }
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(ran, ok);
  EXPECT_GT(ok, 0);
}

TEST(EngineThreadTest, WhatACommandHoldsMayCallTheThreadWhenItGoes) {
  EngineThread thread({});
  std::promise<void> gone;
  struct CallsBack {
    CallsBack(EngineThread& thread, std::promise<void>& gone) : thread(thread), gone(gone) {}
    EngineThread& thread;
    std::promise<void>& gone;
    ~CallsBack() {
      (void)thread.last_progress();
      gone.set_value();
    }
  };
  auto held = std::make_shared<CallsBack>(thread, gone);
  ASSERT_TRUE(thread.Post([held = std::move(held)] {}).ok());
  EXPECT_EQ(gone.get_future().wait_for(std::chrono::seconds(20)), std::future_status::ready);
}

}  // namespace
}  // namespace tandem
