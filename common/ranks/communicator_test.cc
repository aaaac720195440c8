#include "common/ranks/communicator.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/ranks/testing/counted_communication.h"
#include "common/ranks/testing/rank_processes.h"
#include "common/tensor/aten/catch_torch_errors.h"

namespace tandem::ranks {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Returns values that differ by rank, and whose sum over the ranks depends on the order of the
// additions.
at::Tensor Values(int rank, int64_t count, at::ScalarType type) {
  const at::Tensor index = at::arange(count, at::kDouble);
  const at::Tensor values = (index * (rank + 1) * 0.7311).sin() * at::pow(10.0, index % 7 - 3);
  return (type == at::kLong ? values * 1000 : values).to(type);
}

const at::ScalarType kSummedTypes[] = {at::kFloat, at::kDouble, at::kLong, at::kBFloat16};

// Returns the message of the error that `body` throws, "" if it throws none.
template <typename Body>
std::string ErrorOf(Body&& body) {
  return std::string(CatchTorchErrors("", [&]() -> absl::Status {
                       body();
                       return absl::OkStatus();
                     }).message());
}

class CommunicatorTest : public testing::TestWithParam<int> {
 protected:
  int size() const { return GetParam(); }
  void RunOnAll(const std::function<void(Communicator&)>& body) const {
    RunConnected(size(), [&](const std::shared_ptr<Communicator>& ranks) {
      ASSERT_EQ(ranks->size(), size());
      body(*ranks);
    });
  }
};

INSTANTIATE_TEST_SUITE_P(Ranks, CommunicatorTest, testing::Values(1, 2, 4));

TEST_P(CommunicatorTest, AllReduceSumsEveryType) {
  RunOnAll([&](Communicator& communicator) {
    for (const at::ScalarType type : kSummedTypes) {
      for (const int64_t count : {0, 1, 1003}) {
        at::Tensor sum = Values(communicator.rank(), count, type);
        communicator.AllReduce(sum, Reduction::kSum);
        at::Tensor expected = at::zeros({count}, at::kDouble);
        for (int rank = 0; rank < size(); ++rank) expected += Values(rank, count, type);
        ASSERT_EQ(sum.scalar_type(), type);
        const double tolerance = type == at::kBFloat16 ? 4e-3 : type == at::kFloat ? 1e-6 : 1e-14;
        EXPECT_TRUE(at::allclose(sum.to(at::kDouble), expected, tolerance, tolerance * 1e3))
            << type << " " << count;
      }
    }
  });
}

// In bfloat16, 256 + 1 is 256: sums in bfloat16 would lose every small number.
TEST_P(CommunicatorTest, Bfloat16IsReducedInFloat32) {
  RunOnAll([&](Communicator& communicator) {
    const int rank = communicator.rank();
    const at::Tensor own = at::full({communicator.size()}, rank == 0 ? 256.0 : 1.0, at::kBFloat16);
    const at::Tensor expected = at::full({1}, 256.0 + size() - 1, at::kFloat).to(at::kBFloat16);
    at::Tensor sum = own.clone();
    communicator.AllReduce(sum, Reduction::kSum);
    EXPECT_TRUE(at::equal(sum, expected.expand(size())));
    const at::Tensor shard = at::empty({1}, at::kBFloat16);
    communicator.ReduceScatter(shard, own);
    EXPECT_TRUE(at::equal(shard, expected));
  });
}

TEST_P(CommunicatorTest, AllReduceTakesTheMaximum) {
  RunOnAll([&](Communicator& communicator) {
    for (const at::ScalarType type : kSummedTypes) {
      at::Tensor maximum = Values(communicator.rank(), 100, type);
      communicator.AllReduce(maximum, Reduction::kMax);
      at::Tensor expected = Values(0, 100, type);
      for (int rank = 1; rank < size(); ++rank) {
        expected = at::maximum(expected, Values(rank, 100, type));
      }
      EXPECT_TRUE(at::equal(maximum, expected)) << type;
    }
  });
}

TEST_P(CommunicatorTest, ReduceScatterAddsInTheOrderOfTheRanks) {
  RunOnAll([&](Communicator& communicator) {
    for (const at::ScalarType type : kSummedTypes) {
      for (const int64_t count : {0, 1, 1001}) {
        const at::Tensor output = at::empty({count}, type);
        communicator.ReduceScatter(output, Values(communicator.rank(), count * size(), type));
        at::Tensor expected = Values(0, count * size(), type);
        if (type == at::kBFloat16) expected = expected.to(at::kFloat);
        for (int rank = 1; rank < size(); ++rank) {
          expected = expected + Values(rank, count * size(), type).to(expected.scalar_type());
        }
        const at::Tensor own = expected.narrow(0, communicator.rank() * count, count);
        EXPECT_TRUE(at::equal(output, own.to(type))) << type << " " << count;
      }
    }
  });
}

TEST_P(CommunicatorTest, ReduceScatterMayWriteIntoItsOwnShard) {
  RunOnAll([&](Communicator& communicator) {
    const at::Tensor input = Values(communicator.rank(), 30 * size(), at::kFloat);
    const at::Tensor apart = at::empty({30}, at::kFloat);
    communicator.ReduceScatter(apart, input);
    EXPECT_TRUE(at::equal(input, Values(communicator.rank(), 30 * size(), at::kFloat)));
    const at::Tensor inside = input.narrow(0, 30 * communicator.rank(), 30);
    communicator.ReduceScatter(inside, input);
    EXPECT_TRUE(at::equal(inside, apart));
  });
}

// The rows that rank `from` sends to rank `to`: none to some.
int64_t RowsBetween(int from, int to) { return (from + to * to + 1) % 3; }

TEST_P(CommunicatorTest, AllToAllGivesEveryRankItsRows) {
  RunOnAll([&](Communicator& communicator) {
    const int rank = communicator.rank();
    const auto rows = [](int from, int to, at::ScalarType type) {
      const int64_t count = RowsBetween(from, to);
      return (at::arange(count * 2).view({count, 2}) + (from * 50 + to * 10)).to(type);
    };
    for (const at::ScalarType type : {at::kFloat, at::kLong, at::kBFloat16, at::kByte}) {
      std::vector<int64_t> sent, received;
      std::vector<at::Tensor> to_ranks, from_ranks;
      for (int peer = 0; peer < size(); ++peer) {
        sent.push_back(RowsBetween(rank, peer));
        received.push_back(RowsBetween(peer, rank));
        to_ranks.push_back(rows(rank, peer, type));
        from_ranks.push_back(rows(peer, rank, type));
      }
      const at::Tensor input = at::cat(to_ranks), expected = at::cat(from_ranks);
      const at::Tensor output = at::zeros(expected.sizes(), type);
      communicator.ResetVolume();
      communicator.AllToAll(output, input, sent, received);
      EXPECT_TRUE(at::equal(output, expected)) << type;
      EXPECT_EQ(communicator.volume().all_to_all.calls, 1);
      EXPECT_EQ(communicator.volume().bytes(),
                (input.size(0) - sent[rank]) * 2 * static_cast<int64_t>(input.element_size()));
      sent[rank] += 1;
      EXPECT_THAT(ErrorOf([&] { communicator.AllToAll(output, input, sent, received); }),
                  HasSubstr("all-to-all"));
    }
  });
}

TEST_P(CommunicatorTest, AllGatherGivesTheInputsOfAllRanks) {
  RunOnAll([&](Communicator& communicator) {
    const int rank = communicator.rank();
    for (const at::ScalarType type : {at::kFloat, at::kLong, at::kBFloat16, at::kByte}) {
      for (const int64_t count : {0, 1, 777}) {
        std::vector<at::Tensor> all;
        for (int peer = 0; peer < size(); ++peer) {
          all.push_back((at::arange(count, at::kLong) + 100 * peer).remainder(251).to(type));
        }
        const at::Tensor expected = at::cat(all);
        const at::Tensor output = at::zeros({count * size()}, type);
        communicator.AllGather(output, all[rank]);
        EXPECT_TRUE(at::equal(output, expected)) << type << " " << count;
        // The same in place.
        output.zero_();
        const at::Tensor own = output.narrow(0, rank * count, count);
        own.copy_(all[rank]);
        communicator.AllGather(output, own);
        EXPECT_TRUE(at::equal(output, expected)) << type << " " << count;
      }
    }
  });
}

TEST_P(CommunicatorTest, BroadcastComesFromEveryRoot) {
  RunOnAll([&](Communicator& communicator) {
    for (int root = 0; root < size(); ++root) {
      at::Tensor tensor = Values(communicator.rank(), 100, at::kBFloat16).view({4, 25});
      communicator.Broadcast(tensor, root);
      EXPECT_TRUE(at::equal(tensor, Values(root, 100, at::kBFloat16).view({4, 25})));
    }
  });
}

TEST_P(CommunicatorTest, SendsBetweenAPairArriveInOrder) {
  RunOnAll([&](Communicator& communicator) {
    if (size() == 1) return;
    const int next = (communicator.rank() + 1) % size();
    const int previous = (communicator.rank() + size() - 1) % size();
    std::vector<at::Tensor> sent, received;
    std::vector<CollectiveHandle> transfers;
    for (int64_t i = 0; i < 8; ++i) {  // of several sizes, all in flight
      const int64_t count = 1 + i * i * i * 500;
      sent.push_back(at::full({count}, communicator.rank() * 10.0 + static_cast<double>(i)));
      received.push_back(at::zeros({count}));
    }
    for (size_t i = 0; i < sent.size(); ++i) {
      transfers.push_back(communicator.RecvAsync(received[i], previous));
      transfers.push_back(communicator.SendAsync(sent[i], next));
    }
    for (CollectiveHandle& transfer : transfers) transfer.Wait();
    for (size_t i = 0; i < received.size(); ++i) {
      EXPECT_TRUE(received[i].eq(previous * 10.0 + static_cast<double>(i)).all().item<bool>());
    }
    // A token that goes round the ring, rank by rank.
    at::Tensor token = at::full({3}, 1.0);
    if (communicator.rank() == 0) communicator.Send(token, next);
    communicator.Recv(token, previous);
    if (communicator.rank() != 0) {
      token += 1;
      communicator.Send(token, next);
    }
    const double expected = communicator.rank() == 0 ? size() : communicator.rank() + 1;
    EXPECT_TRUE(token.eq(expected).all().item<bool>());
  });
}

// All ranks start them in one order, and wait for them in another.
TEST_P(CommunicatorTest, SeveralCollectivesMayBeUnderWay) {
  RunOnAll([&](Communicator& communicator) {
    const int n = size(), rank = communicator.rank();
    std::vector<at::Tensor> inputs, sums, wholes;
    std::vector<CollectiveHandle> reduced, gathered;
    for (int i = 0; i < 4; ++i) {
      inputs.push_back(at::full({n * 5000}, static_cast<double>(rank + 10 * i)));
      sums.push_back(at::zeros({5000}));
      wholes.push_back(at::zeros({n * 5000}));
      reduced.push_back(communicator.ReduceScatterAsync(sums[i], inputs[i]));
      gathered.push_back(communicator.AllGatherAsync(wholes[i], inputs[i].narrow(0, 0, 5000)));
    }
    for (int i = 3; i >= 0; --i) {
      gathered[i].Wait();
      gathered[i].Wait();  // does nothing
      EXPECT_TRUE(sums[i].eq(0).all().item<bool>() || n == 1) << "the sum is made in Wait";
      reduced[i].Wait();
      EXPECT_TRUE(sums[i].eq(n * (n - 1) / 2 + n * 10 * i).all().item<bool>());
      for (int peer = 0; peer < n; ++peer) {
        EXPECT_TRUE(wholes[i].narrow(0, peer * 5000, 5000).eq(peer + 10 * i).all().item<bool>());
      }
    }
  });
}

TEST_P(CommunicatorTest, AHandleWaitsWhenItIsDroppedOrReplaced) {
  RunOnAll([&](Communicator& communicator) {
    const at::Tensor input = at::full({1000 * size()}, 1.0);
    const at::Tensor first = at::zeros({1000}), second = at::zeros({1000});
    {
      CollectiveHandle handle = communicator.ReduceScatterAsync(first, input);
      handle = communicator.ReduceScatterAsync(second, input);
      EXPECT_TRUE(first.eq(size()).all().item<bool>());
      const CollectiveHandle moved = std::move(handle);
    }
    EXPECT_TRUE(second.eq(size()).all().item<bool>());
  });
}

TEST_P(CommunicatorTest, BytesOfAnyLengthTravel) {
  RunOnAll([&](Communicator& communicator) {
    const int rank = communicator.rank();
    const std::string long_text(100000, 'x');
    // A broadcast's first exchange holds 4096 bytes, 8 of them the length.
    for (const std::string& text : {std::string(), std::string("a\0b", 3), std::string(4088, 'x'),
                                    std::string(4089, 'y'), long_text}) {
      for (int root = 0; root < size(); ++root) {
        EXPECT_EQ(communicator.BroadcastBytes(rank == root ? text : "other", root), text);
      }
      EXPECT_EQ(communicator.AllGatherBytes(text), std::vector<std::string>(size(), text));
    }
    const std::vector<std::string> gathered =
        communicator.AllGatherBytes(std::string(3 * rank, static_cast<char>('a' + rank)));
    ASSERT_EQ(static_cast<int>(gathered.size()), size());
    for (int peer = 0; peer < size(); ++peer) {
      EXPECT_EQ(gathered[peer], std::string(3 * peer, static_cast<char>('a' + peer)));
    }
  });
}

TEST_P(CommunicatorTest, VolumesFollowTheFormulas) {
  RunOnAll([&](Communicator& communicator) {
    const int64_t n = size();
    at::Tensor tensor = at::zeros({n * 100}), half = at::zeros({n * 100}, at::kBFloat16);
    const at::Tensor shard = at::zeros({100});
    communicator.AllReduce(tensor, Reduction::kSum);
    communicator.AllReduce(half, Reduction::kSum);  // travels as float32
    communicator.ReduceScatter(shard, tensor);
    communicator.ReduceScatter(half.narrow(0, communicator.rank() * 100, 100), half);
    communicator.AllGather(tensor, shard);
    communicator.Broadcast(tensor, 0);
    if (n > 1) {
      if (communicator.rank() == 0) communicator.Send(tensor, 1);
      if (communicator.rank() == 1) communicator.Recv(tensor, 0);
    }
    communicator.AllGatherBytes("12345");
    const CommunicationVolume volume = communicator.volume();
    const int64_t bytes = n * 400, root = communicator.rank() == 0 && n > 1 ? 1 : 0;
    EXPECT_EQ(volume.all_reduce.calls, 2);
    EXPECT_EQ(volume.all_reduce.bytes, 2 * (2 * (n - 1) * bytes / n));
    EXPECT_EQ(volume.reduce_scatter.calls, 2);
    EXPECT_EQ(volume.reduce_scatter.bytes, (n - 1) * bytes / n * 3 / 2);
    EXPECT_EQ(volume.all_gather.calls, 1);
    EXPECT_EQ(volume.all_gather.bytes, (n - 1) * bytes / n);
    EXPECT_EQ(volume.broadcast.calls, 1);
    EXPECT_EQ(volume.broadcast.bytes, root * bytes);
    EXPECT_EQ(volume.send.calls, root);
    EXPECT_EQ(volume.send.bytes, root * bytes);
    EXPECT_EQ(volume.plain_data.bytes, (n - 1) * 5);
    EXPECT_EQ(volume.bytes(), volume.all_reduce.bytes + volume.reduce_scatter.bytes +
                                  volume.all_gather.bytes + volume.broadcast.bytes +
                                  volume.send.bytes + volume.plain_data.bytes);
    communicator.ResetVolume();
    EXPECT_EQ(communicator.volume().bytes(), 0);
    EXPECT_EQ(communicator.volume().all_reduce.calls, 0);
  });
}

TEST_P(CommunicatorTest, TensorsThatDoNotFitAreRefused) {
  RunOnAll([&](Communicator& communicator) {
    const int n = size();
    const at::Tensor whole = at::zeros({n * 4}), shard = at::zeros({4});
    const at::Tensor strided = at::zeros({n * 4, 2}).select(1, 0);
    at::Tensor integers = at::zeros({4}, at::kInt), bad = strided;
    EXPECT_THAT(ErrorOf([&] { communicator.AllReduce(integers, Reduction::kSum); }),
                HasSubstr("all-reduce takes float32"));
    EXPECT_THAT(ErrorOf([&] { communicator.AllReduce(bad, Reduction::kSum); }),
                HasSubstr("contiguous"));
    EXPECT_THAT(ErrorOf([&] { communicator.ReduceScatter(at::zeros({5}), whole); }),
                HasSubstr("is not"));
    EXPECT_THAT(ErrorOf([&] { communicator.AllGather(whole, shard.to(at::kDouble)); }),
                HasSubstr("is not"));
    EXPECT_THAT(ErrorOf([&] { communicator.AllGather(strided, shard); }), HasSubstr("contiguous"));
    EXPECT_THAT(ErrorOf([&] { communicator.Broadcast(bad, 0); }), HasSubstr("contiguous"));
    EXPECT_THAT(ErrorOf([&] { communicator.Send(shard, n); }), HasSubstr("no rank"));
    EXPECT_THAT(ErrorOf([&] { communicator.Send(shard, communicator.rank()); }),
                HasSubstr("itself"));
    EXPECT_THAT(ErrorOf([&] { communicator.BroadcastBytes("", -1); }), HasSubstr("no rank"));
    EXPECT_THAT(ErrorOf([&] { communicator.Split("twice", {{0}, {0}}); }), HasSubstr("twice"));
    EXPECT_EQ(communicator.volume().bytes(), 0);
  });
}

TEST(CommunicatorSplitTest, GivesTheGroupThatHoldsTheRank) {
  RunOnRanks(4, [](const RankEnvironment& environment) {
    const auto world = Communicator::Connect(environment, {.timeout = absl::Minutes(1)}).value();
    const auto sum_of_ranks = [&](Communicator& group) {
      at::Tensor sum = at::full({1}, static_cast<double>(environment.rank));
      group.AllReduce(sum, Reduction::kSum);
      return sum.item<double>();
    };
    const auto pairs = world->Split("pairs", {{0, 2}, {3, 1}});
    ASSERT_NE(pairs, nullptr);
    EXPECT_EQ(pairs->size(), 2);
    EXPECT_EQ(pairs->rank(), environment.rank == 0 || environment.rank == 3 ? 0 : 1);
    EXPECT_EQ(sum_of_ranks(*pairs), environment.rank % 2 == 0 ? 2 : 4);
    // The same name again, without some ranks, and then a group of one.
    const auto some = world->Split("pairs", {{1, 2, 3}});
    EXPECT_EQ(some == nullptr, environment.rank == 0);
    if (some != nullptr) {
      EXPECT_EQ(sum_of_ranks(*some), 6);
      const auto alone = some->Split("alone", {{0}, {2, 1}});
      EXPECT_EQ(alone->size(), environment.rank == 1 ? 1 : 2);
      EXPECT_EQ(sum_of_ranks(*alone), environment.rank == 1 ? 1 : 5);
      const int64_t sent = some->volume().bytes();
      EXPECT_GT(sent, 0);
      EXPECT_EQ(alone->volume().all_reduce.calls, 1);
    }
    EXPECT_EQ(world->volume().bytes(), 0);
    // Of 4 bytes 2 (n - 1) / n: in a pair 4, of three ranks 5.
    const int64_t sent = environment.rank == 0 ? 4 : environment.rank == 1 ? 9 : 13;
    EXPECT_EQ(world->total_sent_bytes(), sent);
    EXPECT_EQ(sum_of_ranks(*world), 6);
    world->Barrier();
  });
}

TEST(CommunicatorFailureTest, AnErrorNamesTheCollectiveAndThePeer) {
  // The two survivors stay to the end: one that left would be another lost peer.
  void* const shared = mmap(nullptr, sizeof(std::atomic<int>), PROT_READ | PROT_WRITE,
                            MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(shared, MAP_FAILED);
  auto* const done = new (shared) std::atomic<int>(0);
  RunOnRanks(3, [done](const RankEnvironment& environment) {
    const auto world = Communicator::Connect(environment, {.timeout = absl::Minutes(1)}).value();
    if (environment.rank == 1) _exit(0);
    at::Tensor tensor = at::zeros({30});
    const at::Tensor shard = at::zeros({10});
    EXPECT_THAT(ErrorOf([&] { world->Recv(tensor, 1); }),
                testing::AllOf(HasSubstr("receive in 'world' on rank"), HasSubstr("with rank 1:"),
                               HasSubstr("of ranks 0, 1, 2")));
    EXPECT_THAT(ErrorOf([&] { world->ReduceScatter(shard, tensor); }),
                testing::AllOf(HasSubstr("reduce-scatter in"), HasSubstr("with rank 1:")));
    EXPECT_THAT(ErrorOf([&] { world->AllGather(tensor, shard); }),
                testing::AllOf(HasSubstr("all-gather in"), HasSubstr("with rank 1:")));
    EXPECT_THAT(ErrorOf([&] { world->AllReduce(tensor, Reduction::kSum); }),
                HasSubstr("all-reduce in"));
    for (++*done; *done < 2;) absl::SleepFor(absl::Milliseconds(1));
  });
  munmap(shared, sizeof(std::atomic<int>));
}

TEST(CommunicatorFailureTest, ARankThatDoesNothingIsATimeout) {
  RankProcesses processes(2, [](const RankEnvironment& environment) {
    const auto world = Communicator::Connect(environment, {.timeout = absl::Seconds(3)});
    ASSERT_TRUE(world.ok()) << world.status();
    if (environment.rank == 1) pause();
    at::Tensor tensor = at::zeros({30});
    EXPECT_THAT(ErrorOf([&] { (*world)->Recv(tensor, 1); }),
                testing::AllOf(HasSubstr("with rank 1:"), HasSubstr("imed out")));
  });
  EXPECT_EQ(processes.Wait(0), "");
}

TEST(CommunicatorConnectTest, MissingRanksAreNamed) {
  RunOnRanks(4, [](const RankEnvironment& environment) {
    if (environment.rank % 2 == 1) return;
    const auto world = Communicator::Connect(environment, {.timeout = absl::Seconds(2)});
    EXPECT_EQ(world.status().code(), absl::StatusCode::kUnavailable) << world.status();
    EXPECT_THAT(std::string(world.status().message()),
                HasSubstr(absl::StrCat("127.0.0.1:", environment.master_port)));
    if (environment.rank == 0) {
      EXPECT_THAT(std::string(world.status().message()), HasSubstr("rank 1, 3 did not join"));
    }
  });
}

// A disk may take longer than any time limit between two meetings of the ranks.
TEST(CommunicatorConnectTest, PatientRanksWaitLongerThanTheTimeLimit) {
  RunOnRanks(2, [](const RankEnvironment& environment) {
    const absl::Duration limit = absl::Seconds(2);
    const auto world = Communicator::Connect(environment, {.timeout = limit}).value();
    const std::shared_ptr<Communicator> patient = world->patient();
    EXPECT_EQ(patient, world->patient());
    at::Tensor value = at::full({1}, environment.rank, at::kFloat);
    if (environment.rank == 1) absl::SleepFor(limit + absl::Seconds(1));
    if (environment.rank == 0) patient->Recv(value, 1);
    if (environment.rank == 1) patient->Send(value, 0);
    EXPECT_EQ(value.item<float>(), 1);
    EXPECT_THAT(patient->AllGatherBytes(absl::StrCat(environment.rank)), ElementsAre("0", "1"));
    patient->Barrier();
  });
}

TEST(CommunicatorConnectTest, EveryGroupCountsTowardsTheTotal) {
  RunConnected(2, [](const std::shared_ptr<Communicator>& world) {
    const std::shared_ptr<Communicator> pair = world->Split("pair", {{0, 1}});
    const CommunicationVolume volume = Communicated(*world, [&] {
      at::Tensor values = at::ones({10}, at::kFloat);
      world->AllReduce(values, Reduction::kSum);
      if (pair->rank() == 0) pair->Send(values, 1);
      if (pair->rank() == 1) pair->Recv(values, 0);
      world->patient()->Broadcast(values, 1);
    });
    const bool leads = world->rank() == 0;
    EXPECT_EQ(volume.all_reduce.calls, 1);
    EXPECT_EQ(volume.all_reduce.bytes, 40);
    EXPECT_EQ(volume.send.bytes, leads ? 40 : 0);
    EXPECT_EQ(volume.receive.calls, leads ? 0 : 1);
    EXPECT_EQ(volume.receive.bytes, leads ? 0 : 40);
    EXPECT_EQ(volume.broadcast.bytes, leads ? 0 : 40);
    EXPECT_EQ(volume.bytes(), 80);
    EXPECT_EQ(Communicated(*world, [] {}).bytes(), 0);
  });
}

TEST(CommunicatorConnectTest, ARankWaitsForAHostThatStartsLater) {
  RunOnRanks(2, [](const RankEnvironment& environment) {
    if (environment.rank == 0) absl::SleepFor(absl::Seconds(1));
    const auto world = Communicator::Connect(environment, {.timeout = absl::Seconds(60)});
    EXPECT_TRUE(world.ok()) << world.status();
  });
}

TEST(CommunicatorConnectTest, AHostThatIsNotThereIsUnavailable) {
  RunOnRanks(2, [](const RankEnvironment& environment) {
    if (environment.rank == 0) return;
    const auto world = Communicator::Connect(environment, {.timeout = absl::Seconds(1)});
    EXPECT_EQ(world.status().code(), absl::StatusCode::kUnavailable) << world.status();
    EXPECT_THAT(std::string(world.status().message()),
                testing::AllOf(HasSubstr(absl::StrCat("127.0.0.1:", environment.master_port)),
                               HasSubstr("refused")));
  });
}

TEST(CommunicatorConnectTest, APortThatIsTakenIsUnavailable) {
  RunOnRanks(1, [](const RankEnvironment& environment) {
    const int listener = socket(AF_INET6, SOCK_STREAM, 0);
    sockaddr_in6 address = {};
    address.sin6_family = AF_INET6;
    socklen_t length = sizeof(address);
    auto* generic = reinterpret_cast<sockaddr*>(&address);
    ASSERT_EQ(bind(listener, generic, length), 0);
    ASSERT_EQ(listen(listener, 1), 0);
    ASSERT_EQ(getsockname(listener, generic, &length), 0);
    RankEnvironment host = environment;
    host.world_size = 2;
    host.master_port = ntohs(address.sin6_port);
    const auto world = Communicator::Connect(host, {.timeout = absl::Seconds(5)});
    EXPECT_EQ(world.status().code(), absl::StatusCode::kUnavailable) << world.status();
    EXPECT_THAT(std::string(world.status().message()),
                testing::AllOf(HasSubstr(absl::StrCat("127.0.0.1:", host.master_port)),
                               HasSubstr("in use")));
  });
}

// The kernel accepts connections on behalf of a program that never reads from them.
TEST(CommunicatorConnectTest, AListenerThatNeverAnswersIsUnavailable) {
  RunOnRanks(1, [](RankEnvironment environment) {
    const int listener = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(address);
    auto* generic = reinterpret_cast<sockaddr*>(&address);
    ASSERT_EQ(bind(listener, generic, length), 0);
    ASSERT_EQ(listen(listener, 8), 0);
    ASSERT_EQ(getsockname(listener, generic, &length), 0);
    environment.rank = 1;
    environment.world_size = 2;
    environment.master_port = ntohs(address.sin_port);
    const auto world = Communicator::Connect(environment, {.timeout = absl::Milliseconds(200)});
    EXPECT_EQ(world.status().code(), absl::StatusCode::kUnavailable) << world.status();
    EXPECT_THAT(std::string(world.status().message()),
                testing::AllOf(HasSubstr("rank 1 cannot reach the store"),
                               HasSubstr(absl::StrCat("127.0.0.1:", environment.master_port)),
                               HasSubstr("did not answer in time")));
  });
}

TEST(CommunicatorConnectTest, LocalhostIsAnAddressToo) {
  RunOnRanks(2, [](RankEnvironment environment) {
    environment.master_addr = "localhost";
    const auto world = Communicator::Connect(environment, {.timeout = absl::Minutes(1)});
    ASSERT_TRUE(world.ok()) << world.status();
    EXPECT_THAT((*world)->AllGatherBytes(absl::StrCat(environment.rank)), ElementsAre("0", "1"));
    (*world)->Barrier();
  });
}

}  // namespace
}  // namespace tandem::ranks
