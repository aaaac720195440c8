#include "common/base/progress.h"

#include <atomic>
#include <utility>

namespace tandem {
namespace {

std::atomic<int64_t> progress_count = 0;
thread_local const std::function<void()>* listener = nullptr;

}  // namespace

ProgressScope::ProgressScope(std::function<void()> on_progress)
    : on_progress_(std::move(on_progress)), outer_(listener) {
  listener = &on_progress_;
}

ProgressScope::~ProgressScope() { listener = outer_; }

void CountProgress() { ++progress_count; }

void NoteProgress() {
  CountProgress();
  if (listener != nullptr) (*listener)();
}

int64_t ProgressCount() { return progress_count; }

}  // namespace tandem
