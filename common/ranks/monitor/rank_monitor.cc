#include "common/ranks/monitor/rank_monitor.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/base/errors/status_macros.h"
#include "common/base/logging.h"
#include "common/base/progress.h"
#include "common/base/steady_time.h"
#include "common/ranks/monitor/heartbeats.h"
#include "common/ranks/transport/c10d_transport.h"

namespace tandem::ranks {

// The monitor's state, shared with its threads: a thread that waits for an answer of a stopped rank
// 0 outlives the monitor.
class RankMonitor::Watch {
 public:
  Watch(const RankEnvironment& environment, RankMonitorOptions options,
        std::unique_ptr<RankStore> store)
      : environment_(environment),
        options_(std::move(options)),
        interval_(absl::ToChronoNanoseconds(std::min(absl::Seconds(1), options_.silence / 8))),
        silence_(absl::ToChronoNanoseconds(options_.silence)),
        store_(std::move(store)),
        heartbeats_(environment.rank, environment.world_size, options_.silence, SteadyTime::Now()) {
    for (int rank = 0; rank < environment.world_size; ++rank) {
      keys_.push_back(absl::StrCat(rank));
    }
  }

  // Beats and reads the beats of the others until the end of the monitor.
  void RunBeats() {
    try {
      BeatUntilTheEnd();
    } catch (const std::exception& error) {
      ReportStore(absl::StrCat("cannot be reached: ", FirstLine(error.what())));
    }
    const std::lock_guard lock(mutex_);
    beats_ended_ = true;
    changed_.notify_all();
  }

  // Reports a store that does not answer: a read from it has no time limit of its own.
  void RunStoreWatch() {
    StoreSilence store;
    std::unique_lock lock(mutex_);
    while (!store.MissedAll(heartbeats_.last_update())) {
      if (changed_.wait_for(lock, silence_ / StoreSilence::kQuarters,
                            [this] { return beats_ended_ || abandoned_; })) {
        return;
      }
    }
    lock.unlock();
    ReportStore(absl::StrCat("has been silent for ", absl::FormatDuration(options_.silence)));
  }

  // Ends the beats with a last record, or with none if it is empty. Returns when the record is
  // written, or cannot be.
  void End(const std::string& last_record) {
    std::unique_lock lock(mutex_);
    if (!ending_) {
      ending_ = true;
      last_record_ = last_record;
      changed_.notify_all();
    }
    changed_.wait_for(lock, 2 * silence_, [this] { return beats_ended_ || reported_; });
  }

  void Fail(const std::string& message) {
    End(FailedRecord(absl::StrCat("rank ", environment_.rank, ": ", message)));
  }

  int64_t progress_of_others() const { return progress_of_others_; }

  // Ends the store watch. Returns whether the thread of the beats has ended; if not, it waits for
  // an answer of a stopped rank 0.
  bool Abandon() {
    const std::lock_guard lock(mutex_);
    abandoned_ = true;
    changed_.notify_all();
    return beats_ended_;
  }

 private:
  static std::string FirstLine(absl::string_view text) {
    return std::string(text.substr(0, text.find('\n')));
  }

  void BeatUntilTheEnd() {
    for (const std::string& key : keys_) store_->Touch(key);
    for (int64_t count = 0;; ++count) {
      store_->Set(keys_[environment_.rank], BeatRecord(count, ProgressCount()));
      ReadRecords();
      const std::string failure = FindFailure();
      if (!failure.empty()) {
        // Ranks that have not noticed it read it here, and report the same.
        Conclude(FailedRecord(failure));
        Report(failure);
        return;
      }
      if (HostHasLeft()) {
        Conclude(LeftRecord());
        return;
      }
      std::unique_lock lock(mutex_);
      if (changed_.wait_for(lock, interval_, [this] { return ending_; })) {
        const std::string last_record = last_record_;
        lock.unlock();
        if (!last_record.empty()) Conclude(last_record);
        return;
      }
    }
  }

  void ReadRecords() {
    const std::vector<std::string> records = store_->Get(keys_);
    const std::lock_guard lock(mutex_);
    heartbeats_.Update(records, SteadyTime::Now());
    progress_of_others_ = heartbeats_.progress_of_others();
  }

  std::string FindFailure() {
    const std::lock_guard lock(mutex_);
    return heartbeats_.FindFailure();
  }

  bool HostHasLeft() {
    const std::lock_guard lock(mutex_);
    return heartbeats_.host_has_left();
  }

  bool OthersHaveConcluded() {
    const std::lock_guard lock(mutex_);
    return heartbeats_.OthersHaveConcluded();
  }

  // Writes the last record. Rank 0 then keeps the store until all others have written theirs, but
  // no longer than `silence`. A store that is gone does not matter any more.
  void Conclude(const std::string& record) {
    const SteadyTime deadline = SteadyTime::Now() + options_.silence;
    try {
      store_->Set(keys_[environment_.rank], record);
      ReadRecords();  // when this returns, the record has arrived
      while (environment_.rank == 0 && !OthersHaveConcluded() && SteadyTime::Now() < deadline) {
        std::this_thread::sleep_for(interval_ / 10);
        ReadRecords();
      }
    } catch (const std::exception&) {
    }
  }

  void Report(const std::string& failure) {
    {
      const std::lock_guard lock(mutex_);
      // A monitor that ends reports nothing.
      if (reported_ || ending_ || abandoned_) return;
      reported_ = true;
    }
    options_.on_failure(failure);
  }

  void ReportStore(const std::string& what) {
    std::string process;
    {
      const std::lock_guard lock(mutex_);
      process = heartbeats_.process(0);
    }
    Report(absl::StrCat("rank 0", process, ", the host of the store at ", environment_.master_addr,
                        ":", environment_.master_port, ", ", what));
  }

  const RankEnvironment environment_;
  const RankMonitorOptions options_;
  const std::chrono::nanoseconds interval_, silence_;
  const std::unique_ptr<RankStore> store_;
  std::vector<std::string> keys_;  // of the ranks' records

  std::mutex mutex_;
  std::condition_variable changed_;
  Heartbeats heartbeats_;
  std::atomic<int64_t> progress_of_others_ = 0;
  bool ending_ = false;  // by Leave, Fail or the destructor
  std::string last_record_;
  bool reported_ = false;
  bool beats_ended_ = false;
  bool abandoned_ = false;
};

void RankMonitorOptions::EndProcess(const std::string& failure) {
  Log(LogLevel::kError, "rank_failure", {{"failure", failure}});
  std::_Exit(1);
}

absl::StatusOr<std::unique_ptr<RankMonitor>> RankMonitor::Start(const RankEnvironment& environment,
                                                                RankMonitorOptions options) {
  std::unique_ptr<RankMonitor> monitor(new RankMonitor);
  if (environment.world_size == 1) return monitor;
  TANDEM_ASSIGN_OR_RETURN(std::unique_ptr<RankStore> store,
                          RankStore::Connect(environment, "rank_monitor", options.silence));
  monitor->watch_ = std::make_shared<Watch>(environment, std::move(options), std::move(store));
  monitor->beats_ = std::thread([watch = monitor->watch_] { watch->RunBeats(); });
  monitor->store_watch_ = std::thread([watch = monitor->watch_] { watch->RunStoreWatch(); });
  return monitor;
}

RankMonitor::~RankMonitor() {
  if (watch_ == nullptr) return;
  watch_->End("");
  const bool beats_ended = watch_->Abandon();
  store_watch_.join();
  beats_ended ? beats_.join() : beats_.detach();
}

int64_t RankMonitor::progress_of_others() const {
  return watch_ == nullptr ? 0 : watch_->progress_of_others();
}

void RankMonitor::Fail(const std::string& message) {
  if (watch_ != nullptr) watch_->Fail(message);
}

void RankMonitor::Leave() {
  if (watch_ != nullptr) watch_->End(LeftRecord());
}

}  // namespace tandem::ranks
