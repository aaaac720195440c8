#include "common/base/available_memory.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

namespace tandem {
namespace {

namespace fs = std::filesystem;

class AvailableMemoryTest : public testing::Test {
 protected:
  AvailableMemoryTest() {
    root_ = testing::TempDir() + "/available_memory_" +
            testing::UnitTest::GetInstance()->current_test_info()->name();
    fs::remove_all(root_);
    Write("/proc/meminfo", "MemTotal: 9000 kB\nMemFree: 1 kB\nMemAvailable:    4000 kB\n");
    Write("/proc/self/cgroup", "1:name=systemd:/x\n0::/a/b\n");
  }

  void Write(const std::string& path, const std::string& text) {
    fs::create_directories(fs::path(root_ + path).parent_path());
    std::ofstream(root_ + path) << text;
  }

  std::string root_;
};

TEST_F(AvailableMemoryTest, IsWhatTheKernelSaysWithoutLimits) {
  EXPECT_EQ(AvailableMemoryBytes(root_), 4000 * 1024);
  Write("/sys/fs/cgroup/a/b/memory.max", "max\n");
  Write("/sys/fs/cgroup/a/b/memory.current", "5\n");
  EXPECT_EQ(AvailableMemoryBytes(root_), 4000 * 1024);
}

TEST_F(AvailableMemoryTest, ALimitOfTheGroupOrOfAnAncestorHolds) {
  Write("/sys/fs/cgroup/a/b/memory.max", "3000\n");
  Write("/sys/fs/cgroup/a/b/memory.current", "1000\n");
  EXPECT_EQ(AvailableMemoryBytes(root_), 2000);
  Write("/sys/fs/cgroup/a/b/memory.stat", "anon 400\ninactive_file 600\n");
  EXPECT_EQ(AvailableMemoryBytes(root_), 2600);
  Write("/sys/fs/cgroup/a/memory.max", "1500\n");
  Write("/sys/fs/cgroup/a/memory.current", "1000\n");
  EXPECT_EQ(AvailableMemoryBytes(root_), 500);
  Write("/sys/fs/cgroup/memory.max", "1000\n");  // the root of a container's own namespace
  Write("/sys/fs/cgroup/memory.current", "1000\n");
  EXPECT_EQ(AvailableMemoryBytes(root_), 0);
}

TEST_F(AvailableMemoryTest, IsUnknownWhereNothingSays) {
  EXPECT_EQ(AvailableMemoryBytes(root_ + "/nowhere"), std::nullopt);
}

TEST_F(AvailableMemoryTest, ThisMachineSays) {
  EXPECT_GT(AvailableMemoryBytes().value_or(0), 1 << 20);
}

}  // namespace
}  // namespace tandem
