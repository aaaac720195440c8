#include "common/base/machine/machine_resources.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>

namespace tandem {
namespace {

namespace fs = std::filesystem;

class MachineResourcesTest : public testing::Test {
 protected:
  MachineResourcesTest() {
    root_ = testing::TempDir() + "/machine_resources_" +
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

TEST_F(MachineResourcesTest, MemoryIsWhatTheKernelSaysWithoutLimits) {
  EXPECT_EQ(AvailableMemoryBytes(root_), 4000 * 1024);
  Write("/sys/fs/cgroup/a/b/memory.max", "max\n");
  Write("/sys/fs/cgroup/a/b/memory.current", "5\n");
  EXPECT_EQ(AvailableMemoryBytes(root_), 4000 * 1024);
}

TEST_F(MachineResourcesTest, AMemoryLimitOfTheGroupOrOfAnAncestorHolds) {
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

TEST_F(MachineResourcesTest, AMemoryLimitOfVersion1Holds) {
  Write("/proc/self/cgroup", "4:memory:/a/b\n1:name=systemd:/x\n0::/\n");
  Write("/sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "9223372036854771712\n");
  Write("/sys/fs/cgroup/memory/a/b/memory.usage_in_bytes", "1000\n");
  EXPECT_EQ(AvailableMemoryBytes(root_), 4000 * 1024);
  Write("/sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "3000\n");
  Write("/sys/fs/cgroup/memory/a/b/memory.stat", "inactive_file 1\ntotal_inactive_file 600\n");
  EXPECT_EQ(AvailableMemoryBytes(root_), 2600);
  Write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "2000\n");  // a container's own mount
  Write("/sys/fs/cgroup/memory/memory.usage_in_bytes", "500\n");
  EXPECT_EQ(AvailableMemoryBytes(root_), 1500);
}

TEST_F(MachineResourcesTest, CoresAreThoseOfTheQuotaAtMost) {
  const int cores = AvailableCores(root_);
  EXPECT_GE(cores, 1);
  Write("/sys/fs/cgroup/a/b/cpu.max", "max 100000\n");
  EXPECT_EQ(AvailableCores(root_), cores);
  Write("/sys/fs/cgroup/a/b/cpu.max", "9900000 100000\n");
  EXPECT_EQ(AvailableCores(root_), std::min(cores, 99));
  Write("/sys/fs/cgroup/a/cpu.max", "150000 100000\n");
  EXPECT_EQ(AvailableCores(root_), 1);
  Write("/sys/fs/cgroup/a/cpu.max", "50000 100000\n");
  EXPECT_EQ(AvailableCores(root_), 1);
}

TEST_F(MachineResourcesTest, AQuotaOfVersion1Holds) {
  Write("/proc/self/cgroup", "3:cpu,cpuacct:/a\n0::/\n");
  const int cores = AvailableCores(root_);
  Write("/sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "100000\n");
  Write("/sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "-1\n");
  EXPECT_EQ(AvailableCores(root_), cores);
  Write("/sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "100000\n");
  EXPECT_EQ(AvailableCores(root_), 1);
}

TEST_F(MachineResourcesTest, HyperThreadsCountOnce) {
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    Write("/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list",
          "0-1023\n");
  }
  EXPECT_EQ(AvailableCores(root_), 1);
}

TEST_F(MachineResourcesTest, MemoryIsUnknownWhereNothingSays) {
  EXPECT_EQ(AvailableMemoryBytes(root_ + "/nowhere"), std::nullopt);
}

TEST_F(MachineResourcesTest, ThisMachineSays) {
  EXPECT_GT(AvailableMemoryBytes().value_or(0), 1 << 20);
}

}  // namespace
}  // namespace tandem
