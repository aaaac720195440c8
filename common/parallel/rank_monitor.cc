#include "common/parallel/rank_monitor.h"

#include <limits.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "common/base/logging.h"
#include "common/base/status_macros.h"
#include "common/parallel/c10d_transport.h"

namespace tandem::parallel {
namespace {

using Clock = std::chrono::steady_clock;

// The record of a rank in the store: "beat <count> (pid <pid> on <host>)", "left", or "failed "
// with what all ranks report. Empty until the first beat.
constexpr absl::string_view kBeat = "beat ";
constexpr absl::string_view kLeft = "left";
constexpr absl::string_view kFailed = "failed ";

std::string Beat(int64_t count) {
  std::array<char, HOST_NAME_MAX + 1> host = {};
  gethostname(host.data(), host.size() - 1);
  return absl::StrCat(kBeat, count, " (pid ", getpid(), " on ", host.data(), ")");
}

// " (pid <pid> on <host>)" of a beat, else "".
std::string Process(const std::string& record) {
  const size_t process = record.find(" (");
  return absl::StartsWith(record, kBeat) && process != std::string::npos ? record.substr(process)
                                                                         : "";
}

bool IsLast(const std::string& record) {
  return record == kLeft || absl::StartsWith(record, kFailed);
}

}  // namespace

// Shared with the threads: one that hangs in an answer of a stopped rank 0 outlives the monitor.
class RankMonitor::Watch {
 public:
  Watch(const RankEnvironment& environment, RankMonitorOptions options,
        std::unique_ptr<RankStore> store)
      : environment_(environment),
        options_(std::move(options)),
        interval_(absl::ToChronoNanoseconds(std::min(absl::Seconds(1), options_.silence / 8))),
        silence_(absl::ToChronoNanoseconds(options_.silence)),
        store_(std::move(store)),
        peers_(environment.world_size) {
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

  // The store's answers have no time limit of their own. Waits for one in quarters of the time: a
  // machine that stood still for longer has waited for one of them.
  void RunStoreWatch() {
    std::unique_lock lock(mutex_);
    Clock::time_point heard = answered_;
    for (int quarters = 0; quarters < 4;) {
      if (changed_.wait_for(lock, silence_ / 4, [this] { return beats_ended_ || abandoned_; })) {
        return;
      }
      quarters = answered_ == heard ? quarters + 1 : 0;
      heard = answered_;
    }
    lock.unlock();
    ReportStore(absl::StrCat("has been silent for ", absl::FormatDuration(options_.silence)));
  }

  // Ends the beats with a last record, none if it is empty. Returns when that is done, or when it
  // cannot be.
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
    End(absl::StrCat(kFailed, "rank ", environment_.rank, ": ", message));
  }

  // No thread of the watch is to be waited for, but one that hangs. False if that is the beats'.
  bool Abandon() {
    const std::lock_guard lock(mutex_);
    abandoned_ = true;
    changed_.notify_all();
    return beats_ended_;
  }

 private:
  struct Peer {
    std::string record;
    Clock::time_point moved = Clock::now();
    std::string process;  // " (pid … on …)" once known
  };

  static std::string FirstLine(absl::string_view text) {
    return std::string(text.substr(0, text.find('\n')));
  }

  void BeatUntilTheEnd() {
    for (const std::string& key : keys_) store_->Touch(key);
    for (int64_t count = 0;; ++count) {
      store_->Set(keys_[environment_.rank], Beat(count));
      ReadRecords();
      const std::string failure = FindFailure();
      if (!failure.empty()) {
        // Whoever has not noticed yet reads it here, and reports the same.
        Conclude(absl::StrCat(kFailed, failure));
        Report(failure);
        return;
      }
      if (HostHasLeft()) {
        Conclude(std::string(kLeft));
        return;
      }
      std::unique_lock lock(mutex_);
      const Clock::time_point asleep = Clock::now();
      if (changed_.wait_for(lock, interval_, [this] { return ending_; })) {
        const std::string last_record = last_record_;
        lock.unlock();
        if (!last_record.empty()) Conclude(last_record);
        return;
      }
      // Who stood still, perhaps with the whole machine, cannot tell who else was silent.
      if (Clock::now() - asleep > silence_ / 2) {
        for (Peer& peer : peers_) peer.moved = Clock::now();
      }
    }
  }

  void ReadRecords() {
    std::vector<std::string> records = store_->Get(keys_);
    const std::lock_guard lock(mutex_);
    answered_ = Clock::now();
    for (int rank = 0; rank < environment_.world_size; ++rank) {
      Peer& peer = peers_[rank];
      if (records[rank] == peer.record) continue;
      peer.record = std::move(records[rank]);
      peer.moved = answered_;
      if (absl::StartsWith(peer.record, kBeat)) peer.process = Process(peer.record);
    }
  }

  // What a rank reports, or which has been silent; "" if all is well.
  std::string FindFailure() {
    const std::lock_guard lock(mutex_);
    for (int rank = 0; rank < environment_.world_size; ++rank) {
      absl::string_view failure = peers_[rank].record;
      if (rank != environment_.rank && absl::ConsumePrefix(&failure, kFailed)) {
        return std::string(failure);
      }
    }
    for (int rank = 0; rank < environment_.world_size; ++rank) {
      const Peer& peer = peers_[rank];
      if (rank == environment_.rank || peer.record == kLeft) continue;
      if (answered_ - peer.moved > silence_) {
        return absl::StrCat("rank ", rank, peer.process, " has been silent for ",
                            absl::FormatDuration(options_.silence));
      }
    }
    return "";
  }

  bool HostHasLeft() {
    const std::lock_guard lock(mutex_);
    return peers_[0].record == kLeft;
  }

  // Whether every other rank has written its last record, or does not seem to live.
  bool OthersHaveConcluded() {
    const std::lock_guard lock(mutex_);
    for (int rank = 0; rank < environment_.world_size; ++rank) {
      const Peer& peer = peers_[rank];
      if (rank == environment_.rank || IsLast(peer.record)) continue;
      if (answered_ - peer.moved < silence_ / 2) return false;
    }
    return true;
  }

  // Writes the last record. Rank 0 then keeps the store for the others, until all have concluded,
  // too, but no longer than `silence`. A store that is gone does not matter any more.
  void Conclude(const std::string& record) {
    const Clock::time_point deadline = Clock::now() + silence_;
    try {
      store_->Set(keys_[environment_.rank], record);
      ReadRecords();  // when this returns, the record has arrived
      while (environment_.rank == 0 && !OthersHaveConcluded() && Clock::now() < deadline) {
        std::this_thread::sleep_for(interval_ / 10);
        ReadRecords();
      }
    } catch (const std::exception&) {
    }
  }

  void Report(const std::string& failure) {
    {
      const std::lock_guard lock(mutex_);
      // A monitor that ends has had its say.
      if (reported_ || ending_ || abandoned_) return;
      reported_ = true;
    }
    options_.on_failure(failure);
  }

  void ReportStore(const std::string& what) {
    std::string process;
    {
      const std::lock_guard lock(mutex_);
      process = peers_[0].process;
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
  std::vector<Peer> peers_;
  Clock::time_point answered_ = Clock::now();  // when the store last did
  bool ending_ = false;                        // by Leave, Fail or the destructor
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

void RankMonitor::Fail(const std::string& message) {
  if (watch_ != nullptr) watch_->Fail(message);
}

void RankMonitor::Leave() {
  if (watch_ != nullptr) watch_->End(std::string(kLeft));
}

}  // namespace tandem::parallel
