#include "common/ops/threads/parallel_for.h"

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <fstream>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace tandem::ops {
namespace {

class ParallelForTest : public testing::Test {
 protected:
  ~ParallelForTest() override { at::set_num_threads(threads_before_); }

  // Returns the threads that ran a loop of `count` items of `work` multiply-adds. A range ends when
  // `expected` threads have begun one, or after ten seconds.
  static std::set<std::thread::id> Threads(int64_t count, int64_t work, size_t expected) {
    std::mutex mutex;
    std::condition_variable begun;
    std::set<std::thread::id> threads;
    ParallelFor(count, work, [&](int64_t, int64_t) {
      std::unique_lock lock(mutex);
      threads.insert(std::this_thread::get_id());
      begun.notify_all();
      begun.wait_for(lock, std::chrono::seconds(10), [&] { return threads.size() >= expected; });
    });
    return threads;
  }

 private:
  const int threads_before_ = at::get_num_threads();
};

TEST_F(ParallelForTest, DividesWorkAmongTheThreadsThatAreSet) {
  at::set_num_threads(2);
  EXPECT_EQ(Threads(8, kWorkPerThread, 2).size(), 2);
  at::set_num_threads(1);
  EXPECT_EQ(Threads(8, kWorkPerThread, 1).size(), 1);
}

TEST_F(ParallelForTest, KeepsSmallWorkOnTheCallersThread) {
  at::set_num_threads(2);
  EXPECT_EQ(Threads(8, 1, 1), std::set<std::thread::id>{std::this_thread::get_id()});
}

TEST_F(ParallelForTest, VisitsEveryItemOnce) {
  at::set_num_threads(2);
  std::vector<int> visits(1001, 0);
  ParallelFor(static_cast<int64_t>(visits.size()), kWorkPerThread, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) ++visits[static_cast<size_t>(i)];
  });
  EXPECT_EQ(visits, std::vector<int>(1001, 1));
}

// Two runtimes would have two pools of threads on the same cores.
TEST_F(ParallelForTest, OneOpenMpRuntimeIsLoaded) {
  std::set<std::string> runtimes;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const size_t path = line.find('/');
    if (path == std::string::npos) continue;
    for (const char* name : {"/libgomp", "/libomp", "/libiomp"}) {
      if (line.find(name, path) != std::string::npos) runtimes.insert(line.substr(path));
    }
  }
  EXPECT_EQ(runtimes.size(), 1) << testing::PrintToString(runtimes);
}

}  // namespace
}  // namespace tandem::ops
