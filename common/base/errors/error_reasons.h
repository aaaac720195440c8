// Every reason that an error may carry (WithReason): the stable name that clients branch on, what
// it means, and what the caller should do. docs/reference/errors.md is generated from this file.
#ifndef TANDEM_COMMON_BASE_ERRORS_ERROR_REASONS_H_
#define TANDEM_COMMON_BASE_ERRORS_ERROR_REASONS_H_

#include "absl/strings/string_view.h"

namespace tandem {

struct ErrorReason {
  absl::string_view name;
  absl::string_view meaning;
  absl::string_view remedy;
};

namespace reason {

// Any server.
inline constexpr ErrorReason kLoading{"LOADING", "The server is still loading its model.",
                                      "Wait for the delay given in the error, then call again."};
inline constexpr ErrorReason kDraining{
    "DRAINING", "The server is shutting down and takes no new work.",
    "Call again once it has been restarted, or call another server."};
inline constexpr ErrorReason kQueueFull{"QUEUE_FULL",
                                        "Too many calls are waiting for a worker of the server.",
                                        "Wait for the delay given in the error, then call again."};

inline constexpr ErrorReason kTokenMissing{"TOKEN_MISSING",
                                           "The server requires a token, but the call had none.",
                                           "Give the client a token file (TANDEM_TOKEN_FILE)."};
inline constexpr ErrorReason kTokenUnknown{
    "TOKEN_UNKNOWN", "The call's token is not in any of the server's token files.",
    "Give the client a token that this server accepts; after a rotation, the new one."};
inline constexpr ErrorReason kInsufficientRole{"INSUFFICIENT_ROLE",
                                               "The role of the token may not call this method.",
                                               "Use a token of the role named in the error."};
inline constexpr ErrorReason kPathOutsideRoots{
    "PATH_OUTSIDE_ROOTS",
    "The path, with symbolic links resolved, is not inside any of server.path_roots.",
    "Use a path inside these directories, or add a directory to server.path_roots."};

// Trainer and critic.
inline constexpr ErrorReason kStalePolicyVersion{
    "STALE_POLICY_VERSION", "The version that the server holds is not the step's expected_version.",
    "Read the version with GetServerInfo, and check that no other run trains this server."};
inline constexpr ErrorReason kRequestIdReused{
    "REQUEST_ID_REUSED", "The request_id was already used for a step with different content.",
    "Choose a new request_id for every step; reuse one only with the same content."};
inline constexpr ErrorReason kUnknownPolicyVersion{
    "UNKNOWN_POLICY_VERSION",
    "The trajectory was written by a version that this trainer never had.",
    "Check that the rollout server gets its weights from this trainer."};
inline constexpr ErrorReason kTrajectoryTooOld{
    "TRAJECTORY_TOO_OLD", "The trajectory was written more than max_staleness versions ago.",
    "Publish before generating, or raise objective.max_staleness."};
inline constexpr ErrorReason kWeightsDiffer{
    "WEIGHTS_DIFFER", "The version number is right, but its weights differ from this trainer's.",
    "Generate again after a publication; check that the rollout server and the trainer started "
    "from the same model."};
inline constexpr ErrorReason kNoCritic{"NO_CRITIC", "GAE needs a critic, but the trainer has none.",
                                       "Start the trainer with critic_address."};
inline constexpr ErrorReason kNoReferenceModel{
    "NO_REFERENCE_MODEL", "The request needs a reference policy, but the trainer has none.",
    "Start the trainer with reference_model or lora, or set kl_coefficient to 0."};
inline constexpr ErrorReason kNoJuniorModel{
    "NO_JUNIOR_MODEL", "The KL towards the junior needs the junior in the trainer, which has none.",
    "Start the trainer with junior_model, or choose junior_kl_kind FORWARD_SAMPLED."};
inline constexpr ErrorReason kNoTeacherModel{
    "NO_TEACHER_MODEL",
    "Distillation over the whole vocabulary needs a teacher in the trainer, which has none.",
    "Start the trainer with teacher_model, or set distillation.top_k and send a teacher's tokens."};
inline constexpr ErrorReason kBaseModelFrozen{
    "BASE_MODEL_FROZEN", "A policy step trains the senior, which is frozen in this trainer.",
    "Start the trainer without speculator.freeze_base_model, or send supervised steps."};

// Any two models that write or judge the same tokens.
inline constexpr ErrorReason kVocabularyMismatch{
    "VOCABULARY_MISMATCH", "Two models that must share a vocabulary have different ones.",
    "Choose models that have the same tokenizer.json; padding rows after its ids may differ."};

// Any server whose model takes images.
inline constexpr ErrorReason kBlobMissing{
    "BLOB_MISSING", "The request names blobs of pixels that the server does not hold.",
    "Upload them (BlobService) and repeat the request; the Python client does both by itself."};
inline constexpr ErrorReason kNoImages{
    "NO_IMAGES", "The request has images, but a model that must read them takes none.",
    "Choose a model of the same vision-language family, or do without that model for this prompt."};

// Rollout.
inline constexpr ErrorReason kNoJunior{
    "NO_JUNIOR", "The request needs a junior, but the server has none.",
    "Start the rollout server with junior.model, or turn tandem off."};
inline constexpr ErrorReason kNoSpeculator{
    "NO_SPECULATOR",
    "The request asks for drafts of a speculator's heads, but the server has no speculator.",
    "Start the rollout server with senior.speculator, or choose another method."};
inline constexpr ErrorReason kWeightsChanged{
    "WEIGHTS_CHANGED", "New weights kept arriving while a Score was being computed.",
    "Call again, with fewer sequences or between publications."};

// Weight transfer.
inline constexpr ErrorReason kStaleWeightVersion{
    "STALE_WEIGHT_VERSION", "The receiver already holds this version or a newer one.",
    "Publish with allow_rollback to go back to an older version, as at the start of a run."};
inline constexpr ErrorReason kChunkOutOfOrder{
    "CHUNK_OUT_OF_ORDER", "The chunk is not the next one of its update.",
    "Call BeginUpdate to find out where to continue, and send from there."};
inline constexpr ErrorReason kChunkDamaged{
    "CHUNK_DAMAGED", "The bytes of a chunk do not match the checksum sent with them.",
    "Send the chunk again."};
inline constexpr ErrorReason kDigestMismatch{
    "DIGEST_MISMATCH", "The weights that the receiver committed are not those that were sent.",
    "Publish again; if it persists, suspect the memory of one of the machines."};
inline constexpr ErrorReason kUpdateReplaced{
    "UPDATE_REPLACED", "Another publication replaced this one before its commit.",
    "Check that only one trainer publishes to this server."};
inline constexpr ErrorReason kWeightsNotFinite{
    "WEIGHTS_NOT_FINITE", "The published weights hold a value that is infinite or NaN.",
    "Go back to an earlier checkpoint; check policy/grad_norm and the learning rate before the "
    "failure."};

}  // namespace reason
}  // namespace tandem

#endif  // TANDEM_COMMON_BASE_ERRORS_ERROR_REASONS_H_
