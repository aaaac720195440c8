// Progress of long work, noted where it happens: files are read and written far below the engine
// thread whose health they show.
#ifndef TANDEM_COMMON_BASE_PROGRESS_H_
#define TANDEM_COMMON_BASE_PROGRESS_H_

#include <cstdint>
#include <functional>

namespace tandem {

// Calls `on_progress` for every NoteProgress of the thread that creates it, while it lives.
class ProgressScope {
 public:
  explicit ProgressScope(std::function<void()> on_progress);
  ~ProgressScope();
  ProgressScope(const ProgressScope&) = delete;
  ProgressScope& operator=(const ProgressScope&) = delete;

 private:
  const std::function<void()> on_progress_;
  const std::function<void()>* const outer_;
};

// Notes that the work of this thread has advanced: counts it and tells the thread's ProgressScope.
// Cheap.
void NoteProgress();

// Counts progress that no scope hears of. Thread-safe.
void CountProgress();
// Returns how often this process has advanced: other ranks compare it with what they have seen.
int64_t ProgressCount();

}  // namespace tandem

#endif  // TANDEM_COMMON_BASE_PROGRESS_H_
