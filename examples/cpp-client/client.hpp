// A client of kvtierd for one process (scheduler and rank at once) with its KV cache in host memory. It attaches in the
// background, and again whenever the daemon has gone away; until then every lookup is a miss.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "kvtier/v1/cache.grpc.pb.h"
#include "shared.hpp"
#include "side_socket.hpp"

namespace kvtier_example {

using Milliseconds = std::chrono::milliseconds;

// One plane of the only group: its geometry, and where block 0 lies.
struct Plane {
    std::uint64_t fragment_bytes, base_offset, block_stride_bytes;
    std::string description;
};

struct Options {
    std::string socket;    // the gRPC socket
    std::string instance;  // unique among live engines
    kvtier::v1::Namespace name_space;
    std::uint32_t block_tokens = 16;
    std::uint64_t num_blocks = 0;
    std::vector<Plane> planes;
    std::uint32_t doorbells = 4, parts = 64;
};

// The right to load the blocks of one lookup. It ends with its epoch.
struct Lease {
    std::uint64_t id = 0, epoch = 0;
    std::uint32_t blocks = 0;
};

struct Lookup {
    std::uint32_t hits = 0;
    std::string states;  // a byte for each block (see BlockState)
    std::optional<Lease> lease;
    std::optional<kvtier::v1::Error> error;  // why there is no answer, or fewer blocks are leased than can be read
};

// One store or load.
struct Transfer {
    bool is_store = false, ended = false, fenced = false, refused = false;
    std::uint64_t ticket = 0;
    std::uint32_t part_word = 0;
    std::uint32_t blocks = 0;
    std::shared_ptr<WordsPage> page;
    std::string results;  // store: a StoreResult byte for each key, once it is accepted
    kvtier::v1::TransferState state = kvtier::v1::TRANSFER_STATE_ACTIVE;
    std::string succeeded;  // a byte for each key
    std::optional<kvtier::v1::Error> error;
    bool lost = false;  // the session ended first, so only the part word can tell more
};

struct Doorbell {
    std::uint32_t index;
    std::uint64_t value;
};

class Client {
   public:
    Client(Options options, SharedMemory& memory);
    // Leaves, and waits until nothing touches the memory any more.
    ~Client();

    bool wait_ready(Milliseconds timeout);
    std::uint64_t epoch();
    // "layout fingerprint, namespace digest", in hexadecimal.
    std::pair<std::string, std::string> identity();
    std::string last_error();

    // Looks up in prefix mode. A daemon that does not answer in time is a miss.
    Lookup lookup(const std::vector<std::string>& hashes, bool lease, Milliseconds timeout = Milliseconds(1'000));
    void release(const Lease& lease);

    // `block_ids[i]` is the block of `hashes[i]`. The blocks must not change before the transfer is fenced.
    std::shared_ptr<Transfer> store(const std::vector<std::string>& hashes, const std::vector<std::uint32_t>& block_ids,
                                    std::optional<Doorbell> doorbell = {});
    // The lease is consumed if the load is accepted.
    std::shared_ptr<Transfer> load(const Lease& lease, const std::vector<std::uint32_t>& block_ids,
                                   std::optional<Doorbell> doorbell = {});
    // Waits until the transfer has ended and is fenced. Returns false if that takes longer than the time.
    bool wait(Transfer& transfer, Milliseconds timeout);
    PartState part_state(Transfer& transfer);
    // Ends our part for good if it has not started, a store's part also while it runs.
    PartState revoke(Transfer& transfer);
    void ring(std::uint32_t doorbell, std::uint64_t value);

   private:
    struct Session;
    struct Pending;

    void run();
    void attach(Session& session);
    void register_all(Session& session);
    void serve(Session& session);
    void lose(Session& session, const std::string& why);

    void read(Session& session);
    void write(Session& session);
    void take(Session& session, const kvtier::v1::AttachResponse& message);
    void end(Transfer& transfer, const kvtier::v1::TransferEvent& event);
    void reap();

    // All with `mutex_` held.
    std::uint64_t send(Session& session, kvtier::v1::AttachRequest request, Pending pending);
    std::shared_ptr<Transfer> begin(bool is_store, std::uint32_t blocks, std::optional<Doorbell> doorbell,
                                    kvtier::v1::Signals& signals);
    void refuse(Transfer& transfer, kvtier::v1::Error error);
    void heartbeat(Session& session);

    const Options options_;
    SharedMemory& memory_;

    std::mutex mutex_;
    std::condition_variable changed_;
    bool closing_ = false;
    std::shared_ptr<Session> session_;  // from Welcome until the session is lost
    std::shared_ptr<WordsPage> page_;   // the page of the current registration
    std::vector<std::shared_ptr<WordsPage>> past_;
    std::vector<std::uint64_t> rung_;
    std::uint64_t next_ticket_ = 1;  // rises over all epochs
    std::string last_error_;
    std::thread thread_;
};

}  // namespace kvtier_example
