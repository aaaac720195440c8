#include "common/rpc/server/address.h"

#include <gtest/gtest.h>
#include <unistd.h>

namespace tandem::rpc {
namespace {

std::string Advertised(const std::string& host, const std::string& advertised = "") {
  config::v1::ServerOptions options;
  options.set_host(host);
  options.set_advertised_address(advertised);
  return AdvertisedAddress(options, 7701);
}

TEST(AddressTest, TheBoundAddressIsAdvertised) {
  EXPECT_EQ(Advertised("127.0.0.1"), "127.0.0.1:7701");
  EXPECT_EQ(Advertised("::1"), "[::1]:7701");
  EXPECT_EQ(Advertised("[::1]"), "[::1]:7701");
}

TEST(AddressTest, EveryInterfaceIsAdvertisedByTheMachinesName) {
  char name[256] = {};
  ASSERT_EQ(gethostname(name, sizeof(name) - 1), 0);
  for (const char* host : {"0.0.0.0", "::", "[::]"}) {
    EXPECT_EQ(Advertised(host), std::string(name) + ":7701") << host;
  }
}

TEST(AddressTest, WhatIsConfiguredWins) {
  EXPECT_EQ(Advertised("0.0.0.0", "rollout-0.cluster:80"), "rollout-0.cluster:80");
}

}  // namespace
}  // namespace tandem::rpc
