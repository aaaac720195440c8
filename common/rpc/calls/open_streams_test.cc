#include "common/rpc/calls/open_streams.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>

#include "common/base/errors/error.h"
#include "common/base/steady_time.h"

namespace tandem::rpc {
namespace {

OpenStreams::Stream Idle() {
  return {.waits_since = [] { return SteadyTime::InfiniteFuture(); }, .give_up = [] {}};
}

TEST(OpenStreamsTest, OneMoreThanThereMayBeIsRefusedUntilAPlaceIsFree) {
  OpenStreams streams({.max_streams = 2, .patience = absl::Minutes(1)});
  auto first = streams.Enter(Idle());
  auto second = streams.Enter(Idle());
  ASSERT_TRUE(first.ok() && second.ok());
  const absl::Status refused = streams.Enter(Idle()).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(RetryAfterMilliseconds(refused).has_value());
  first->reset();
  EXPECT_TRUE(streams.Enter(Idle()).ok());
}

TEST(OpenStreamsTest, AnUnusedStreamGivesItsPlaceUp) {
  OpenStreams streams({.max_streams = 3, .patience = absl::Minutes(1)});
  std::vector<std::string> given_up;
  const auto stream = [&](const std::string& name, bool unused) {
    OpenStreams::Stream stream = Idle();
    stream.give_up = [&given_up, name] { given_up.push_back(name); };
    stream.unused = [unused] { return unused; };
    return stream;
  };
  auto used = streams.Enter(stream("used", false));
  auto oldest = streams.Enter(stream("oldest", true));
  auto newer = streams.Enter(stream("newer", true));
  auto newest = streams.Enter(stream("newest", false));
  EXPECT_TRUE(newest.ok());
  EXPECT_EQ(given_up, std::vector<std::string>{"oldest"});
  EXPECT_TRUE(streams.Enter(stream("last", false)).ok());
  EXPECT_EQ(given_up, (std::vector<std::string>{"oldest", "newer"}));
}

TEST(OpenStreamsTest, AStreamWhoseClientMayNotCallAnyMoreEndsOnce) {
  OpenStreams streams({.patience = absl::Minutes(1)});
  std::vector<std::string> given_up;
  bool admitted = true;
  const auto stream = [&](const std::string& name, std::function<bool()> is_admitted) {
    OpenStreams::Stream stream = Idle();
    stream.give_up = [&given_up, name] { given_up.push_back(name); };
    stream.admitted = std::move(is_admitted);
    return stream;
  };
  const auto withdrawn = streams.Enter(stream("withdrawn", [&] { return admitted; }));
  const auto other = streams.Enter(stream("other", [] { return true; }));
  const auto open = streams.Enter(stream("open to all", {}));
  streams.EndWithdrawn();
  EXPECT_TRUE(given_up.empty());
  admitted = false;
  streams.EndWithdrawn();
  streams.EndWithdrawn();
  EXPECT_EQ(given_up, std::vector<std::string>{"withdrawn"});
}

TEST(OpenStreamsTest, AStreamThatIsNotReadIsGivenUpOnceAndOnlyThatOne) {
  OpenStreams streams({.patience = absl::Milliseconds(50)});
  std::atomic<int> stalled = 0, lively = 0;
  const SteadyTime long_ago = SteadyTime::Now() - absl::Hours(1);
  auto first = streams.Enter({[&] { return long_ago; }, [&] { ++stalled; }});
  auto second = streams.Enter({[] { return SteadyTime::Now(); }, [&] { ++lively; }});
  auto third = streams.Enter({[] { return SteadyTime::InfiniteFuture(); }, [&] { ++lively; }});
  for (int i = 0; i < 2000 && stalled == 0; ++i) absl::SleepFor(absl::Milliseconds(10));
  absl::SleepFor(absl::Milliseconds(100));  // several looks
  EXPECT_EQ(stalled, 1);
  EXPECT_EQ(lively, 0);
}

}  // namespace
}  // namespace tandem::rpc
