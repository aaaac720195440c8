#include "common/config/server_config.h"

#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/config/config.h"

namespace tandem::config {
namespace {

template <typename Config>
absl::Status Check(const std::string& yaml, Config* config) {
  const absl::Status status = MergeYaml(yaml, config);
  return status.ok() ? Resolve(config) : status;
}

TEST(ServerConfigTest, DefaultsAreThoseOfTheSchema) {
  RolloutServerConfig rollout;
  ASSERT_TRUE(Check("senior_model: s\njunior_model: j", &rollout).ok());
  EXPECT_EQ(rollout.server().host(), "127.0.0.1");
  EXPECT_EQ(rollout.server().grpc_port(), 7701);
  EXPECT_EQ(rollout.server().metrics_port(), 9701);
  EXPECT_EQ(rollout.server().drain_seconds(), 30);
  EXPECT_EQ(rollout.server().log_level(), "info");
  EXPECT_EQ(rollout.server().keepalive_seconds(), 30);
  EXPECT_EQ(rollout.server().keepalive_timeout_seconds(), 20);
  EXPECT_EQ(rollout.server().default_deadline_seconds(), 600);
  EXPECT_EQ(rollout.compute().device(), "cpu");
  EXPECT_EQ(rollout.compute().dtype(), "float32");
  EXPECT_EQ(rollout.compute().kernels(), "auto");
  EXPECT_EQ(rollout.compute().weight_dtype(), "") << "of trainer and critic";
  EXPECT_EQ(rollout.max_num_seqs(), 64);
  EXPECT_EQ(rollout.senior().max_model_len(), 2048);
  EXPECT_EQ(rollout.junior().max_model_len(), 2048);
  EXPECT_EQ(rollout.senior().dtype(), "float32");
  EXPECT_EQ(rollout.junior().dtype(), "float32");
  EXPECT_EQ(rollout.senior().quantization(), types::v1::QUANTIZATION_NONE);
  EXPECT_EQ(rollout.junior().quantization(), types::v1::QUANTIZATION_NONE);
  EXPECT_TRUE(rollout.senior().enforce_eager());
  EXPECT_TRUE(rollout.junior().enforce_eager());
  EXPECT_EQ(rollout.kv_cache_bytes(), 0);
  EXPECT_EQ(rollout.max_batched_tokens(), 2048);
  EXPECT_EQ(rollout.max_queue(), 4096);
  EXPECT_EQ(rollout.on_weight_update(), v1::ON_WEIGHT_UPDATE_RECOMPUTE);
  EXPECT_TRUE(rollout.tandem().enabled());

  TrainerServerConfig trainer;
  ASSERT_TRUE(Check("model: m", &trainer).ok());
  EXPECT_EQ(trainer.server().grpc_port(), 7702);
  EXPECT_EQ(trainer.server().metrics_port(), 9702);
  EXPECT_EQ(trainer.optimizer().learning_rate(), 1e-6);
  EXPECT_EQ(trainer.optimizer().beta1(), 0.9);
  EXPECT_EQ(trainer.optimizer().beta2(), 0.999);
  EXPECT_EQ(trainer.optimizer().epsilon(), 1e-8);
  EXPECT_EQ(trainer.optimizer().max_grad_norm(), 1);
  EXPECT_EQ(trainer.optimizer().schedule(), v1::LEARNING_RATE_SCHEDULE_CONSTANT);
  EXPECT_EQ(trainer.batch().micro_batch_tokens(), 2048);
  EXPECT_EQ(trainer.batch().logits_chunk_bytes(), 0);
  EXPECT_EQ(trainer.batch().loss_impl(), "auto");
  EXPECT_EQ(trainer.strategy().name(), "single");
  EXPECT_EQ(trainer.strategy().recompute_granularity(), "none");
  EXPECT_EQ(trainer.strategy().heartbeat_timeout_seconds(), 15);
  EXPECT_FALSE(trainer.strategy().has_stage());
  EXPECT_EQ(trainer.compute().weight_dtype(), "float32");
  EXPECT_EQ(trainer.compute().activation_dtype(), "float32");
  EXPECT_EQ(trainer.max_samples(), 4096);

  CriticServerConfig critic;
  ASSERT_TRUE(Check("model: m", &critic).ok());
  EXPECT_EQ(critic.server().grpc_port(), 7703);
  EXPECT_EQ(critic.server().metrics_port(), 9703);
}

TEST(ServerConfigTest, ValuesThatAreSetStay) {
  RolloutServerConfig config;
  ASSERT_TRUE(
      Check("senior_model: s\nserver: {grpc_port: 0, drain_seconds: 0}\nmax_queue: 1", &config)
          .ok());
  EXPECT_EQ(config.server().grpc_port(), 0);
  EXPECT_EQ(config.server().drain_seconds(), 0);
  EXPECT_EQ(config.max_queue(), 1);
  EXPECT_FALSE(config.tandem().enabled()) << "without a junior tandem is off";
}

struct Bad {
  const char* yaml;
  const char* path;
  absl::StatusCode code = absl::StatusCode::kInvalidArgument;
};

class BadRolloutTest : public testing::TestWithParam<Bad> {};
TEST_P(BadRolloutTest, NamesTheField) {
  RolloutServerConfig config;
  const absl::Status status = Check(GetParam().yaml, &config);
  EXPECT_EQ(status.code(), GetParam().code) << status;
  EXPECT_EQ(FieldPath(status).value_or(""), GetParam().path) << status;
}
INSTANTIATE_TEST_SUITE_P(
    All, BadRolloutTest,
    testing::Values(
        Bad{"{}", "senior.model"}, Bad{"senior_model: s\nserver: {host: 0.0.0.0}", "server.host"},
        Bad{"senior_model: s\nserver: {grpc_port: 70000}", "server.grpc_port"},
        Bad{"senior_model: s\nserver: {grpc_port: 9701}", "server.metrics_port"},
        Bad{"senior_model: s\nserver: {log_level: loud}", "server.log_level"},
        Bad{"senior_model: s\nserver: {default_deadline_seconds: 0}",
            "server.default_deadline_seconds"},
        Bad{"senior_model: s\ncompute: {device: tpu}", "compute.device"},
        Bad{"senior_model: s\ncompute: {dtype: float16}", "compute.dtype"},
        Bad{"senior_model: s\ncompute: {kernels: own}", "compute.kernels"},
        Bad{"senior_model: s\ncompute: {num_threads: -1}", "compute.num_threads"},
        Bad{"senior_model: s\ncompute: {weight_dtype: float32}", "compute.weight_dtype"},
        Bad{"senior_model: s\ncompute: {activation_dtype: float32}", "compute.activation_dtype"},
        Bad{"senior_model: s\nsenior_activation_dtype: float16", "senior.activation_dtype"},
        Bad{"senior_model: s\nsenior_activation_dtype: bfloat16", "senior.activation_dtype"},
        Bad{"senior_model: s\nsenior_dtype: bfloat16\nsenior_activation_dtype: bfloat16\n"
            "compute: {kernels: aten}",
            "senior.activation_dtype"},
        Bad{"senior_model: s\njunior_model: j\njunior_dtype: bfloat16\n"
            "junior_activation_dtype: bfloat16\ncompute: {device: cuda}",
            "junior.activation_dtype"},
        Bad{"senior_model: s\ntandem: {enabled: true}", "tandem.enabled"},
        Bad{"senior_model: s\ntandem: {prob_senior: 1.5}", "tandem.prob_senior"},
        Bad{"senior_model: s\ntandem: {selection_strategy: chunk}", "tandem.chunk_size"},
        Bad{"senior_model: s\nmax_num_seqs: 0", "max_num_seqs"},
        Bad{"senior_model: s\nmax_queue: 0", "max_queue"},
        Bad{"senior: {model: s, tensor_parallel_size: 0}", "senior.tensor_parallel_size"},
        Bad{"senior_model: s\njunior: {tensor_parallel_size: 2}", "junior.tensor_parallel_size"},
        Bad{"senior_model: s\njunior: {gpu_devices: [0]}", "junior.gpu_devices"},
        Bad{"senior_model: s\njunior: {model: j, gpu_devices: [0]}", "junior.gpu_devices"},
        Bad{"senior_model: s\njunior: {model: j}\ncompute: {device: cuda}\n"
            "junior_gpu_devices: [0, 1]",
            "junior.gpu_devices"},
        Bad{"senior_model: s\njunior: {model: j}\ncompute: {device: cuda}\n"
            "junior_gpu_devices: [-1]",
            "junior.gpu_devices[0]"},
        Bad{"senior: {model: s, dtype: float16}", "senior.dtype"},
        Bad{"senior_model: s\njunior: {model: j, dtype: int8}", "junior.dtype"},
        Bad{"senior_model: s\njunior: {model: j, max_model_len: 1}", "junior.max_model_len"},
        Bad{"senior: {model: s, quantization: int4}\ncompute: {kernels: aten}",
            "senior.quantization", absl::StatusCode::kUnimplemented},
        Bad{"senior_model: s\njunior: {model: j, quantization: int8}\n"
            "compute: {device: cuda}",
            "junior.quantization", absl::StatusCode::kUnimplemented},
        Bad{"senior: {model: s, dtype: bfloat16, quantization: int8, activation_dtype: bfloat16}",
            "senior.activation_dtype", absl::StatusCode::kUnimplemented},
        Bad{"senior: {model: s, gpu_memory_utilization: 0.5}", "senior.gpu_memory_utilization"},
        Bad{"senior_model: s\ncompute: {device: cuda}\nsenior_gpu_memory_utilization: 0",
            "senior.gpu_memory_utilization"},
        Bad{"senior_model: s\ncompute: {device: cuda}\nsenior_gpu_memory_utilization: 1.1",
            "senior.gpu_memory_utilization"},
        Bad{"senior_model: s\njunior: {model: j}\ncompute: {device: cuda}\n"
            "junior_gpu_memory_utilization: -0.4",
            "junior.gpu_memory_utilization"},
        Bad{"senior_model: s\njunior: {model: j}\ncompute: {device: cuda}\n"
            "junior_gpu_memory_utilization: 0.4\nkv_cache_bytes: 1000000",
            "kv_cache_bytes"},
        Bad{"senior: {model: s, enforce_eager: false}", "senior.enforce_eager"},
        Bad{"senior_model: s\njunior: {model: j, enforce_eager: false}", "junior.enforce_eager"},
        Bad{"senior: {model: s, enforce_eager: false}\ncompute: {device: cuda, kernels: aten}",
            "senior.enforce_eager", absl::StatusCode::kUnimplemented},
        Bad{"senior: {model: s, enforce_eager: false, tensor_parallel_size: 2}\n"
            "compute: {device: cuda}",
            "senior.enforce_eager", absl::StatusCode::kUnimplemented},
        Bad{"senior: {model: s, enforce_eager: false, speculator: d}\ncompute: {device: cuda}",
            "senior.enforce_eager", absl::StatusCode::kUnimplemented},
        Bad{"senior: {model: s, model_revision: main}", "senior.model_revision"},
        Bad{"senior_model: s\njunior: {model: j, model_revision: 0123456789ABCDEF}",
            "junior.model_revision"},
        Bad{"senior_model: s\nkv_cache_bytes: -1", "kv_cache_bytes"},
        Bad{"senior_model: s\nkv_cache_dtype: int8", "kv_cache_dtype"},
        Bad{"senior_model: s\ncompute: {product_rows: 8}", "compute.product_rows"},
        Bad{"senior_model: s\ncompute: {device: cuda, product_rows: -1}", "compute.product_rows"},
        Bad{"senior_model: s\ncompute: {ranks_per_gpu: 2}", "compute.ranks_per_gpu"},
        Bad{"senior_model: s\ncompute: {device: cuda, ranks_per_gpu: 0}", "compute.ranks_per_gpu"},
        Bad{"senior_model: s\njunior: {model: j, gpu_devices: [0]}\n"
            "compute: {device: cuda, ranks_per_gpu: 2}",
            "junior.gpu_devices"},
        Bad{"senior_model: s\nheartbeat_timeout_seconds: 0.5", "heartbeat_timeout_seconds"},
        Bad{"senior_model: s\ncollective_timeout_seconds: 0", "collective_timeout_seconds"}));

TEST(ServerConfigTest, AResolvedRolloutIsResolved) {
  RolloutServerConfig config;
  ASSERT_TRUE(Check("senior_model: s", &config).ok());
  EXPECT_EQ(config.senior().tensor_parallel_size(), 1);
  EXPECT_FALSE(config.has_junior());
  EXPECT_EQ(config.heartbeat_timeout_seconds(), 15);
  EXPECT_EQ(config.collective_timeout_seconds(), 600);
  const absl::Status again = Resolve(&config);
  EXPECT_TRUE(again.ok()) << again;
}

TEST(ServerConfigTest, SettingsOfAJuniorNeedOne) {
  for (const std::string setting :
       {"dtype: float32", "quantization: int8", "max_model_len: 9", "gpu_memory_utilization: 0.5",
        "enforce_eager: false", "enable_expert_parallel: true", "speculator: directory",
        "model_revision: 0123456789abcdef0123456789abcdef01234567"}) {
    RolloutServerConfig config;
    const absl::Status status =
        Check(absl::StrCat("senior: {model: s}\njunior: {", setting, "}"), &config);
    EXPECT_EQ(FieldPath(status), absl::StrCat("junior.", setting.substr(0, setting.find(':'))))
        << status;
    EXPECT_NE(status.message().find("needs junior.model"), std::string::npos) << status;
  }
  RolloutServerConfig config;
  const absl::Status status = Check(
      "senior: {model: s}\njunior: {tensor_parallel_size: 1, quantization: none, "
      "enforce_eager: true}",
      &config);
  EXPECT_TRUE(status.ok()) << "defaults say nothing: " << status;
}

TEST(ServerConfigTest, ASettingOfTheOtherLaneIsRefused) {
  RolloutServerConfig config;
  EXPECT_EQ(FieldPath(Check("senior: {model: s, gpu_devices: [0]}", &config)),
            "senior.gpu_devices");
  config.Clear();
  EXPECT_EQ(FieldPath(Check("senior: {model: s}\njunior: {model: j, speculator: d}", &config)),
            "junior.speculator");
}

TEST(ServerConfigTest, TheLanesOfOneServerDiffer) {
  RolloutServerConfig config;
  const absl::Status status = Check(
      "senior_model: s\njunior_model: j\nmax_model_len: 64\njunior_max_model_len: 32\n"
      "compute: {dtype: bfloat16}\nsenior_dtype: float32\njunior_quantization: int4\n"
      "senior_enforce_eager: true\n"
      "junior_model_revision: 0123456789abcdef0123456789abcdef01234567",
      &config);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(config.senior().dtype(), "float32");
  EXPECT_EQ(config.junior().dtype(), "bfloat16");
  EXPECT_EQ(config.junior().quantization(), types::v1::QUANTIZATION_INT4);
  EXPECT_EQ(config.senior().max_model_len(), 64);
  EXPECT_EQ(config.junior().max_model_len(), 32);
  EXPECT_TRUE(Resolve(&config).ok()) << "resolved settings are accepted again";
}

TEST(ServerConfigTest, LanesOfAGpuMayHaveGraphs) {
  RolloutServerConfig config;
  const absl::Status status = Check(
      "senior: {model: s, enforce_eager: false}\njunior: {model: j, enforce_eager: false}\n"
      "compute: {device: cuda}",
      &config);
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_FALSE(config.senior().enforce_eager());
}

TEST(ServerConfigTest, EveryDeviceTypeAndKernelPathIsAccepted) {
  RolloutServerConfig config;
  const absl::Status status =
      Check("senior_model: s\ncompute: {device: cuda, dtype: bfloat16, kernels: aten}", &config);
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(config.compute().kernels(), "aten");
}

TEST(ServerConfigTest, AnAdvertisedAddressIsHostAndPort) {
  for (const char* good : {"rollout-0.cluster:7701", "10.0.0.1:1", "'[::1]:65535'"}) {
    RolloutServerConfig config;
    EXPECT_TRUE(
        Check(absl::StrCat("senior_model: s\nserver: {advertised_address: ", good, "}"), &config)
            .ok())
        << good;
  }
  for (const char* bad :
       {"host", "':7701'", "'host:0'", "'host:70000'", "'::1:7701'", "'host:x'"}) {
    RolloutServerConfig config;
    EXPECT_EQ(
        FieldPath(Check(absl::StrCat("senior_model: s\nserver: {advertised_address: ", bad, "}"),
                        &config)),
        "server.advertised_address")
        << bad;
  }
}

class BadTrainerTest : public testing::TestWithParam<Bad> {};
TEST_P(BadTrainerTest, NamesTheField) {
  TrainerServerConfig config;
  const absl::Status status = Check(GetParam().yaml, &config);
  EXPECT_EQ(status.code(), GetParam().code) << status;
  EXPECT_EQ(FieldPath(status).value_or(""), GetParam().path) << status;
}
INSTANTIATE_TEST_SUITE_P(
    All, BadTrainerTest,
    testing::Values(
        Bad{"{}", "model"}, Bad{"model: m\noptimizer: {beta2: 1}", "optimizer.beta2"},
        Bad{"model: m\noptimizer: {learning_rate: -1}", "optimizer.learning_rate"},
        Bad{"model: m\noptimizer: {epsilon: 0}", "optimizer.epsilon"},
        Bad{"model: m\noptimizer: {schedule: linear}", "optimizer.total_steps"},
        Bad{"model: m\nbatch: {micro_batch_tokens: 0}", "batch.micro_batch_tokens"},
        Bad{"model: m\nstrategy: {stage: 2}", "strategy.stage"},
        Bad{"model: m\nstrategy: {name: zero, stage: 4}", "strategy.stage"},
        Bad{"model: m\nstrategy: {name: zero, reduce_bucket_size: 0}",
            "strategy.reduce_bucket_size"},
        Bad{"model: m\nstrategy: {name: zero, tensor_model_parallel_size: 2}",
            "strategy.tensor_model_parallel_size"},
        Bad{"model: m\nstrategy: {name: megatron, offload_optimizer: true}",
            "strategy.offload_optimizer"},
        Bad{"model: m\nstrategy: {name: megatron, context_parallel_size: 0}",
            "strategy.context_parallel_size"},
        Bad{"model: m\nstrategy: {recompute_granularity: some}", "strategy.recompute_granularity"},
        Bad{"model: m\ncompute: {weight_dtype: int8}", "compute.weight_dtype"},
        Bad{"model: m\ncompute: {weight_dtype: bfloat16, dtype: bfloat16}", "compute.weight_dtype"},
        Bad{"model: m\ncompute: {weight_dtype: bfloat16, device: cuda}", "compute.weight_dtype"},
        Bad{"model: m\ncompute: {activation_dtype: int8}", "compute.activation_dtype"},
        Bad{"model: m\ncompute: {activation_dtype: bfloat16}", "compute.activation_dtype"},
        Bad{"model: m\ncompute: {activation_dtype: bfloat16, weight_dtype: bfloat16}\n"
            "strategy: {name: zero, stage: 3}",
            "compute.activation_dtype", absl::StatusCode::kUnimplemented},
        Bad{"model: m\ncompute: {activation_dtype: bfloat16, weight_dtype: bfloat16, kernels: "
            "aten}",
            "compute.activation_dtype"},
        Bad{"model: m\nstrategy: {heartbeat_timeout_seconds: 0}",
            "strategy.heartbeat_timeout_seconds"},
        Bad{"model: m\nstrategy: {name: many}", "strategy.name"},
        Bad{"model: m\nstrategy: {name: megatron, context_parallel_size: 2}\n"
            "batch: {shared_prefixes: true}",
            "batch.shared_prefixes", absl::StatusCode::kUnimplemented},
        Bad{"model: m\ncompute: {device: cuda}\nbatch: {shared_prefixes: true}",
            "batch.shared_prefixes", absl::StatusCode::kUnimplemented},
        Bad{"model: m\nfreeze: ['']", "freeze[0]"},
        Bad{"model: m\nshutdown_checkpoint_directory: '~/runs'", "shutdown_checkpoint_directory"},
        Bad{"model: m\nmax_samples: 0", "max_samples"}));

TEST(ServerConfigTest, ASettingOfOneStrategyIsRefusedByTheOthers) {
  const google::protobuf::Descriptor& message = *v1::StrategyOptions::descriptor();
  int settings = 0;
  for (int i = 0; i < message.field_count(); ++i) {
    const google::protobuf::FieldDescriptor& field = *message.field(i);
    const std::string& owner = field.options().GetExtension(v1::only_for_strategy);
    if (owner.empty()) continue;
    ++settings;
    const bool is_bool = field.type() == google::protobuf::FieldDescriptor::TYPE_BOOL;
    for (const std::string name : {"single", "zero", "megatron"}) {
      TrainerServerConfig config;
      const absl::Status status =
          Check(absl::StrCat("model: m\nstrategy: {name: ", name, ", ", field.name(), ": ",
                             is_bool ? "true" : "1", "}"),
                &config);
      EXPECT_EQ(FieldPath(status).value_or(""),
                name == owner ? "" : absl::StrCat("strategy.", field.name()))
          << status;
    }
  }
  EXPECT_EQ(settings, 11);
}

TEST(ServerConfigTest, ASpeculatorHasAnAdapterAndALearningRateOfItsOwn) {
  TrainerServerConfig none, trainer;
  ASSERT_TRUE(Check("model: m", &none).ok());
  EXPECT_FALSE(none.has_speculator());
  ASSERT_TRUE(Check("model: m\nspeculator:\n  adapter: mlp\n  optimizer:\n    learning_rate: 1e-3",
                    &trainer)
                  .ok());
  EXPECT_EQ(trainer.speculator().optimizer().learning_rate(), 1e-3);
  EXPECT_EQ(trainer.speculator().optimizer().beta2(), 0.999);
  const auto path_of = [](const std::string& settings) {
    TrainerServerConfig config;
    return FieldPath(Check("model: m\nspeculator: {" + settings + "}", &config)).value_or("");
  };
  EXPECT_EQ(path_of("n_predict: 3"), "speculator.adapter");
  EXPECT_EQ(path_of("adapter: mlp"), "speculator.optimizer.learning_rate");
  const std::string whole = "adapter: mlp, optimizer: {learning_rate: 1e-3";
  EXPECT_EQ(path_of(whole + "}, inner_dim: -1"), "speculator.inner_dim");
  EXPECT_EQ(path_of(whole + ", beta1: 1}"), "speculator.optimizer.beta1");
  EXPECT_EQ(path_of("freeze_base_model: true"), "speculator.adapter");
  const std::string frozen = whole + "}, freeze_base_model: true";
  EXPECT_EQ(path_of(frozen), "");
  EXPECT_EQ(path_of(frozen + "}\nfreeze: [lm_head.weight]\noptimizer: {learning_rate: 1e-6"),
            "freeze");
}

TEST(ServerConfigTest, AdaptersHaveARankOrAFile) {
  const auto path_of = [](const std::string& settings) {
    TrainerServerConfig config;
    return FieldPath(Check("model: m\n" + settings, &config)).value_or("");
  };
  EXPECT_EQ(path_of("lora: {alpha: 3}"), "lora.rank");
  EXPECT_EQ(path_of("lora: {rank: -1}"), "lora.rank");
  EXPECT_EQ(path_of("lora: {rank: 2, alpha: 0}"), "lora.alpha");
  EXPECT_EQ(path_of("lora: {rank: 2, alpha: .nan}"), "lora.alpha");
  EXPECT_EQ(path_of("lora: {path: '~/adapter'}"), "lora.path");
  EXPECT_EQ(path_of("lora: {rank: 2}\nfreeze: ['*']"), "freeze");
  EXPECT_EQ(path_of("lora: {path: /adapter}"), "");
  EXPECT_EQ(path_of("dtype: bfloat16"), "dtype");
  EXPECT_EQ(path_of("quantization: int8"), "quantization");
  for (const char* const stored : {"dtype: bfloat16", "quantization: int8", "quantization: int4"}) {
    const std::string with_lora = absl::StrCat("lora: {rank: 2}\n", stored, "\n");
    const std::string field = std::string(stored).substr(0, std::string(stored).find(':'));
    EXPECT_EQ(path_of(with_lora), "");
    EXPECT_EQ(path_of(with_lora + "strategy: {name: zero, stage: 2}"), "");
    for (const char* const other :
         {"compute: {device: cuda}", "compute: {kernels: aten}", "compute: {dtype: bfloat16}",
          "compute: {weight_dtype: bfloat16}", "strategy: {name: zero, stage: 3}"}) {
      EXPECT_EQ(path_of(with_lora + other), field) << other;
    }
  }
  EXPECT_EQ(path_of("lora: {rank: 2}\ndtype: float16"), "dtype");

  RolloutServerConfig rollout;
  ASSERT_TRUE(Check("senior: {model: s, lora: {rank: 4}}", &rollout).ok());
  EXPECT_EQ(rollout.senior().lora().alpha(), 32);
  EXPECT_THAT(rollout.senior().lora().target_modules(), testing::ElementsAre("all-linear"));
  rollout.Clear();
  ASSERT_TRUE(Check("senior: {model: s, lora: {}}", &rollout).ok());
  EXPECT_FALSE(rollout.senior().has_lora());
  rollout.Clear();
  EXPECT_EQ(FieldPath(Check("senior: {model: s}\njunior: {model: j, lora: {rank: 4}}", &rollout)),
            "junior.lora");
}

TEST(ServerConfigTest, InsecureAllowsAnotherAddress) {
  RolloutServerConfig config;
  EXPECT_TRUE(Check("senior_model: s\nserver: {host: 0.0.0.0, insecure: true}", &config).ok());
}

TEST(ServerConfigTest, AnotherAddressNeedsTlsAndIdentities) {
  RolloutServerConfig config;
  const auto field = [&](const std::string& settings) {
    config.Clear();
    const absl::Status status =
        Check(absl::StrCat("senior_model: s\nserver: {host: 0.0.0.0", settings, "}"), &config);
    return FieldPath(status).value_or("none");
  };
  const std::string certificate = "certificate_file: c, private_key_file: k";
  EXPECT_EQ(field(""), "server.host");
  EXPECT_EQ(field(", tokens: {admin_file: a}"), "server.host");
  EXPECT_EQ(field(absl::StrCat(", tls: {", certificate, "}")), "server.host");
  EXPECT_EQ(field(absl::StrCat(", tls: {", certificate,
                               ", ca_file: ca, require_client_certificate: false}")),
            "server.host");
  EXPECT_EQ(field(absl::StrCat(", tls: {", certificate, "}, tokens: {reader_file: r}")), "none");
  EXPECT_EQ(field(absl::StrCat(", tls: {", certificate, ", ca_file: ca}")), "none");
  EXPECT_TRUE(config.server().tls().require_client_certificate());
}

TEST(ServerConfigTest, TlsNeedsAllOfItsFiles) {
  RolloutServerConfig config;
  const auto field = [&](const std::string& tls) {
    config.Clear();
    const absl::Status status =
        Check(absl::StrCat("senior_model: s\nserver: {tls: {", tls, "}}"), &config);
    return FieldPath(status).value_or("none");
  };
  EXPECT_EQ(field("certificate_file: c"), "server.tls.private_key_file");
  EXPECT_EQ(field("private_key_file: k"), "server.tls.certificate_file");
  EXPECT_EQ(field("certificate_file: c, private_key_file: k, require_client_certificate: true"),
            "server.tls.require_client_certificate");
  EXPECT_EQ(field("ca_file: ca"), "none");
  EXPECT_FALSE(config.server().tls().require_client_certificate());
}

TEST(ServerConfigTest, TheAdminTokenIsTheServersOwnByDefault) {
  RolloutServerConfig config;
  ASSERT_TRUE(Check("senior_model: s\nserver: {tokens: {admin_file: a}}", &config).ok());
  EXPECT_EQ(config.server().tokens().own_file(), "a");
  config.Clear();
  ASSERT_TRUE(
      Check("senior_model: s\nserver: {tokens: {admin_file: a, own_file: o}}", &config).ok());
  EXPECT_EQ(config.server().tokens().own_file(), "o");
}

TEST(ServerConfigTest, LoopbackIsAnAddressNotABeginning) {
  RolloutServerConfig config;
  for (const char* host : {"127.0.0.1", "127.8.9.10", "localhost", "'::1'", "'[::1]'"}) {
    EXPECT_TRUE(Check(absl::StrCat("senior_model: s\nserver: {host: ", host, "}"), &config).ok())
        << host;
  }
  for (const char* host : {"127.evil.example", "127.0.0.1.evil.example", "127.", "128.0.0.1"}) {
    const absl::Status status =
        Check(absl::StrCat("senior_model: s\nserver: {host: ", host, "}"), &config);
    EXPECT_EQ(FieldPath(status), "server.host") << host;
  }
}

}  // namespace
}  // namespace tandem::config
