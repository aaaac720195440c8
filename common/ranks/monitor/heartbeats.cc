#include "common/ranks/monitor/heartbeats.h"

#include <limits.h>
#include <unistd.h>

#include <array>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "common/base/steady_time.h"

namespace tandem::ranks {
namespace {

constexpr absl::string_view kBeat = "beat ";
constexpr absl::string_view kLeft = "left";
constexpr absl::string_view kFailed = "failed ";

// Returns " (pid <pid> on <host>)" of a beat.
std::string ProcessOf(const std::string& beat) {
  const size_t process = beat.find(" (");
  return process == std::string::npos ? "" : beat.substr(process);
}

// Returns the <progress> of a beat.
int64_t ProgressOf(const std::string& beat) {
  const std::vector<absl::string_view> words = absl::StrSplit(beat, ' ');
  int64_t progress = 0;
  return words.size() > 2 && absl::SimpleAtoi(words[2], &progress) ? progress : 0;
}

bool IsLast(const std::string& record) {
  return record == kLeft || absl::StartsWith(record, kFailed);
}

}  // namespace

std::string BeatRecord(int64_t count, int64_t progress) {
  std::array<char, HOST_NAME_MAX + 1> host = {};
  gethostname(host.data(), host.size() - 1);
  return absl::StrCat(kBeat, count, " ", progress, " (pid ", getpid(), " on ", host.data(), ")");
}

std::string LeftRecord() { return std::string(kLeft); }

std::string FailedRecord(absl::string_view failure) { return absl::StrCat(kFailed, failure); }

Heartbeats::Heartbeats(int rank, int world_size, absl::Duration silence, SteadyTime now)
    : rank_(rank),
      silence_(silence),
      last_update_(now),
      peers_(static_cast<size_t>(world_size),
             Peer{.record = "", .process = "", .changed = now, .progress = 0}) {}

void Heartbeats::Update(const std::vector<std::string>& records, SteadyTime now) {
  const bool stood_still = now - last_update_ > silence_ / 2;
  last_update_ = now;
  for (size_t rank = 0; rank < peers_.size(); ++rank) {
    Peer& peer = peers_[rank];
    if (stood_still) peer.changed = now;
    if (records[rank] == peer.record) continue;
    peer.record = records[rank];
    peer.changed = now;
    if (!absl::StartsWith(peer.record, kBeat)) continue;
    peer.process = ProcessOf(peer.record);
    peer.progress = ProgressOf(peer.record);
  }
}

std::string Heartbeats::FindFailure() const {
  for (size_t rank = 0; rank < peers_.size(); ++rank) {
    absl::string_view failure = peers_[rank].record;
    if (static_cast<int>(rank) != rank_ && absl::ConsumePrefix(&failure, kFailed)) {
      return std::string(failure);
    }
  }
  for (size_t rank = 0; rank < peers_.size(); ++rank) {
    const Peer& peer = peers_[rank];
    if (static_cast<int>(rank) == rank_ || peer.record == kLeft) continue;
    if (last_update_ - peer.changed > silence_) {
      return absl::StrCat("rank ", rank, peer.process, " has been silent for ",
                          absl::FormatDuration(silence_));
    }
  }
  return "";
}

int64_t Heartbeats::progress_of_others() const {
  int64_t sum = 0;
  for (size_t rank = 0; rank < peers_.size(); ++rank) {
    if (static_cast<int>(rank) != rank_) sum += peers_[rank].progress;
  }
  return sum;
}

bool Heartbeats::host_has_left() const { return peers_[0].record == kLeft; }

bool Heartbeats::OthersHaveConcluded() const {
  for (size_t rank = 0; rank < peers_.size(); ++rank) {
    const Peer& peer = peers_[rank];
    if (static_cast<int>(rank) == rank_ || IsLast(peer.record)) continue;
    if (last_update_ - peer.changed < silence_ / 2) return false;
  }
  return true;
}

bool StoreSilence::MissedAll(SteadyTime last_answer) {
  missed_ = last_answer == seen_ ? missed_ + 1 : 0;
  seen_ = last_answer;
  return missed_ >= kQuarters;
}

}  // namespace tandem::ranks
