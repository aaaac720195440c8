// The number of drafts that a sequence gets, which follows how many of them are accepted.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_DRAFTS_DRAFT_LENGTH_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_DRAFTS_DRAFT_LENGTH_H_

#include <algorithm>
#include <cstdint>

namespace tandem::rollout {

// The length begins at `most`. It grows by one where all drafts were accepted, and falls to one
// more than were accepted otherwise. After kMaxMisses passes in a row without an accepted draft
// there are none for kPausePasses passes, and then one. If that is rejected, too, the next pause is
// twice as long, up to kMaxPausePasses, until a draft is accepted.
class DraftLength {
 public:
  static constexpr int64_t kMaxMisses = 3;
  static constexpr int64_t kPausePasses = 16;
  static constexpr int64_t kMaxPausePasses = 128;

  explicit DraftLength(int64_t most) : most_(most), length_(most) {}

  // Returns the most drafts for the next pass; 0 during a pause.
  int64_t Next() const { return pause_ > 0 ? 0 : length_; }

  // Begins a pause.
  void Pause() {
    pause_ = next_pause_;
    next_pause_ = std::min(2 * next_pause_, kMaxPausePasses);
  }

  // Takes the outcome of a pass that wrote to the sequence, with `drafted` drafts or with none.
  void OnPass(int64_t drafted, int64_t accepted) {
    if (drafted == 0) {
      pause_ = std::max<int64_t>(0, pause_ - 1);
      return;
    }
    length_ = std::min(most_, accepted == drafted ? std::max(length_, drafted + 1) : accepted + 1);
    if (accepted > 0) {
      misses_ = 0;
      next_pause_ = kPausePasses;
    } else if (++misses_ >= kMaxMisses) {  // after a pause a single miss begins the next one
      Pause();
    }
  }

 private:
  const int64_t most_;
  int64_t length_;
  int64_t misses_ = 0;  // passes in a row whose drafts were all rejected
  int64_t pause_ = 0;   // passes that are left of a pause
  int64_t next_pause_ = kPausePasses;
};

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_DRAFTS_DRAFT_LENGTH_H_
