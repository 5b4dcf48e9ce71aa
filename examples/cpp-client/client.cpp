#include "client.hpp"

#include <grpcpp/grpcpp.h>
#include <poll.h>

#include <algorithm>
#include <random>
#include <set>

namespace kvtier_example {

namespace v1 = kvtier::v1;
using Clock = std::chrono::steady_clock;
using Lock = std::unique_lock<std::mutex>;

namespace {

constexpr Milliseconds kOpen{2'000}, kHello{5'000}, kRegister{75'000};
constexpr Milliseconds kBackoffFirst{50}, kBackoffMost{2'000}, kPoll{5}, kRetry{100};

v1::Error error_of(v1::Reason reason, const std::string& message) {
    v1::Error error;
    error.set_reason(reason);
    error.set_message(message);
    return error;
}

std::string joined(const std::vector<std::string>& hashes) {
    std::string all;
    for (const std::string& hash : hashes) all += hash;
    return all;
}

}  // namespace

// Who waits for the answer to one request.
struct Client::Pending {
    std::shared_ptr<Transfer> transfer;            // of a store or load
    std::shared_ptr<std::optional<Lookup>> lookup;  // its answer goes here; nobody waits for it if this is the last owner
    std::uint64_t epoch = 0;
};

// One attachment: a side connection and a stream, and what belongs to one epoch.
struct Client::Session {
    explicit Session(const std::string& socket) : side(socket) {}

    SideSocket side;
    grpc::ClientContext context;
    std::unique_ptr<v1::Cache::Stub> stub;
    std::unique_ptr<grpc::ClientReaderWriter<v1::AttachRequest, v1::AttachResponse>> stream;
    std::thread reader, writer;

    bool over = false;       // nothing more is sent
    std::string why;         // it is over, as far as the stream knows
    std::optional<v1::Error> hello_refused;
    std::optional<v1::Welcome> welcome;
    v1::InstanceEvent instance;
    bool registered = false;
    bool stale = false;      // instance events of before our registration may still ask for it
    Clock::time_point next_heartbeat;
    std::uint64_t next_id = 1;
    std::deque<v1::AttachRequest> outgoing;
    std::map<std::uint64_t, Pending> pending;
    std::map<std::uint64_t, std::shared_ptr<Transfer>> transfers;  // by ticket
    std::set<std::uint32_t> words_in_use;

    bool ready() const { return welcome && registered && instance.ready(); }
};

Client::Client(Options options, SharedMemory& memory)
    : options_(std::move(options)), memory_(memory), rung_(options_.doorbells), thread_([this] { run(); }) {}

Client::~Client() {
    {
        Lock lock(mutex_);
        closing_ = true;
        changed_.notify_all();
    }
    thread_.join();
    for (bool fenced = false; !fenced; std::this_thread::sleep_for(kPoll)) {
        Lock lock(mutex_);
        reap();
        fenced = past_.empty();
    }
}

// --- the session, in a thread of its own ---

void Client::run() {
    std::mt19937 random{std::random_device{}()};
    Milliseconds backoff = kBackoffFirst;
    for (;;) {
        std::shared_ptr<Session> session;
        const auto began = Clock::now();
        std::string why = "the client is closing";
        try {
            session = std::make_shared<Session>(options_.socket);
            attach(*session);
            {
                Lock lock(mutex_);
                session_ = session;
            }
            serve(*session);
        } catch (const std::exception& error) {  // Lost, Refused, or no memory for a page
            why = error.what();
        }
        if (session) lose(*session, why);
        Lock lock(mutex_);
        last_error_ = why;
        if (Clock::now() - began > std::chrono::seconds(1)) backoff = kBackoffFirst;
        const Milliseconds wait(std::uniform_int_distribution<long>(backoff.count() / 2, backoff.count())(random));
        backoff = std::min(backoff * 2, kBackoffMost);
        if (changed_.wait_for(lock, wait, [this] { return closing_; })) return;
    }
}

void Client::attach(Session& session) {
    v1::SideRequest open;
    open.mutable_open()->add_protocol_versions(1);
    std::vector<Fd> none;
    const auto opened = session.side.call(open, -1, 0, none, kOpen, [] {}).opened();

    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
    arguments.SetString(GRPC_ARG_DEFAULT_AUTHORITY, "localhost");
    session.stub = v1::Cache::NewStub(
        grpc::CreateCustomChannel("unix:" + options_.socket, grpc::InsecureChannelCredentials(), arguments));
    session.stream = session.stub->Attach(&session.context);

    v1::AttachRequest request;
    v1::Hello& hello = *request.mutable_hello();
    hello.add_protocol_versions(1);
    hello.set_token(opened.token());
    hello.set_instance(options_.instance);
    hello.set_role(v1::ROLE_SCHEDULER_AND_RANK);
    hello.set_world_size(1);
    *hello.mutable_namespace_() = options_.name_space;
    hello.set_client("kvtier example client in C++");
    v1::Group& group = *hello.add_groups();
    group.set_kind(v1::GROUP_KIND_FULL_ATTENTION);
    group.set_block_tokens(options_.block_tokens);
    for (const Plane& plane : options_.planes) {
        v1::PlaneGeometry& geometry = *group.add_planes();
        geometry.set_fragment_bytes(plane.fragment_bytes);
        geometry.set_description(plane.description);
    }

    Lock lock(mutex_);
    session.reader = std::thread([this, &session] { read(session); });
    session.writer = std::thread([this, &session] { write(session); });
    send(session, std::move(request), {});
    changed_.wait_for(lock, kHello, [&] {
        return session.welcome || session.hello_refused || !session.why.empty() || closing_;
    });
    if (session.hello_refused) throw Refused(*session.hello_refused);
    if (!session.welcome) throw Lost(session.why.empty() ? "no Welcome in time" : session.why);
    session.next_heartbeat = Clock::now();
}

// Heartbeats, registrations, and looking at the side socket, until the session is over.
void Client::serve(Session& session) {
    auto retry = Clock::now();
    for (;;) {
        bool wanted = false;
        {
            Lock lock(mutex_);
            heartbeat(session);
            reap();
            // Not before all that was submitted has ended: it may be on its way, and would run on the new page.
            wanted = !session.registered && session.transfers.empty() && Clock::now() >= retry;
        }
        if (wanted) {
            try {
                register_all(session);
            } catch (const Refused& refused) {
                // The copy worker is being replaced.
                if (refused.reason() != v1::REASON_WORKER_UNAVAILABLE) throw;
                retry = Clock::now() + kRetry;
            }
        }
        pollfd side{session.side.fd(), POLLIN, 0};  // the daemon says nothing there by itself: it has closed it
        if (poll(&side, 1, 0) > 0) throw Lost("the daemon closed the side socket");
        Lock lock(mutex_);
        changed_.wait_for(lock, Milliseconds(20));
    }
}

// Sends a heartbeat if one is due. Throws Lost if the session is over.
void Client::heartbeat(Session& session) {
    if (closing_) throw Lost("the client is closing");
    if (!session.why.empty()) throw Lost(session.why);
    if (!session.welcome || Clock::now() < session.next_heartbeat) return;
    session.next_heartbeat = Clock::now() + Milliseconds(session.welcome->limits().heartbeat_interval_ms());
    v1::AttachRequest request;
    request.mutable_heartbeat();
    send(session, std::move(request), {});
}

// Words, then memory, with a new page.
void Client::register_all(Session& session) {
    const auto meanwhile = [&] {
        Lock lock(mutex_);
        heartbeat(session);
    };
    auto page = std::make_shared<WordsPage>(options_.doorbells, options_.parts);
    {
        Lock lock(mutex_);
        if (page_) past_.push_back(std::move(page_));
        page_.reset();
        for (std::uint32_t i = 0; i < options_.doorbells; ++i) page->ring(i, rung_[i]);
        reap();
    }
    v1::SideRequest words;
    words.mutable_register_words()->set_doorbells(options_.doorbells);
    words.mutable_register_words()->set_parts(options_.parts);
    std::vector<Fd> worker, none;
    session.side.call(words, page->fd(), 1, worker, kRegister, meanwhile);
    page->adopt_worker(std::move(worker.front()));
    {
        // From here on the worker may have it, so it has to be fenced whatever comes of the rest.
        Lock lock(mutex_);
        for (std::uint32_t i = 0; i < options_.doorbells; ++i) page->ring(i, rung_[i]);
        page_ = page;
    }

    v1::SideRequest memory;
    v1::RegisterMemory& registration = *memory.mutable_register_memory();
    registration.set_mapping_bytes(memory_.bytes());
    v1::GroupMemory& group = *registration.add_groups();
    group.set_num_blocks(options_.num_blocks);
    for (const Plane& plane : options_.planes) {
        v1::Plane& place = *group.add_planes();
        place.set_base_offset(plane.base_offset);
        place.set_block_stride_bytes(plane.block_stride_bytes);
    }
    session.side.call(memory, memory_.fd(), 0, none, kRegister, meanwhile);
    Lock lock(mutex_);
    session.registered = true;
    session.stale = session.instance.reregister_ranks_size() > 0;
    changed_.notify_all();
}

// The session is over: first of all nobody waits any more, and nothing can start.
void Client::lose(Session& session, const std::string& why) {
    {
        Lock lock(mutex_);
        session.over = true;
        session_.reset();
        if (page_) past_.push_back(std::move(page_));
        page_.reset();
        reap();
        for (auto& [id, pending] : session.pending)
            if (pending.lookup) *pending.lookup = Lookup{.error = error_of(v1::REASON_NOT_ATTACHED, why)};
        for (auto& [ticket, transfer] : session.transfers) {
            transfer->lost = true;
            transfer->error = error_of(v1::REASON_EPOCH_ENDED, why);
        }
        session.pending.clear();
        session.transfers.clear();
        changed_.notify_all();
    }
    session.context.TryCancel();
    if (session.reader.joinable()) session.reader.join();
    if (session.writer.joinable()) session.writer.join();
    if (session.stream) session.stream->Finish();
}  // whoever owns it closes the side socket

// Seals the pages of the past, and forgets those that are fenced: transfers that may still be asked for have their own hold.
void Client::reap() {
    for (auto& page : past_) page->seal();
    std::erase_if(past_, [](auto& page) { return page->fenced(); });
}

// --- the stream's threads ---

void Client::read(Session& session) {
    v1::AttachResponse message;
    while (session.stream->Read(&message)) {
        Lock lock(mutex_);
        if (session.over) break;
        take(session, message);
        changed_.notify_all();
    }
    Lock lock(mutex_);
    if (session.why.empty()) session.why = "the daemon closed the stream";
    changed_.notify_all();
}

void Client::write(Session& session) {
    Lock lock(mutex_);
    for (;;) {
        changed_.wait(lock, [&] { return session.over || !session.outgoing.empty(); });
        if (session.over) return;
        const v1::AttachRequest request = std::move(session.outgoing.front());
        session.outgoing.pop_front();
        lock.unlock();
        if (!session.stream->Write(request)) return;  // the reader learns it, too
        lock.lock();
    }
}

void Client::take(Session& session, const v1::AttachResponse& message) {
    Pending pending;
    if (auto found = session.pending.find(message.id()); message.id() != 0 && found != session.pending.end()) {
        pending = std::move(found->second);
        session.pending.erase(found);
    }
    switch (message.body_case()) {
        case v1::AttachResponse::kWelcome:
            session.welcome = message.welcome();
            session.instance = message.welcome().instance();
            break;
        case v1::AttachResponse::kLookup: {
            const v1::LookupResponse& response = message.lookup();
            if (!pending.lookup || response.answers_size() != 1) break;
            Lookup answer{.hits = response.answers(0).hits(), .states = response.answers(0).states()};
            if (response.lease_id() != 0) answer.lease = Lease{response.lease_id(), pending.epoch, answer.hits};
            if (response.has_lease_refused()) answer.error = response.lease_refused();
            if (answer.lease && pending.lookup.use_count() == 1) {  // given up: nobody would load it
                v1::AttachRequest request;
                request.mutable_release()->add_lease_ids(answer.lease->id);
                send(session, std::move(request), {});
            }
            *pending.lookup = std::move(answer);
            break;
        }
        case v1::AttachResponse::kSubmit:  // the transfer's event may have come before
            if (pending.transfer) pending.transfer->results = message.submit().results();
            break;
        case v1::AttachResponse::kTransfer: {
            const auto found = session.transfers.find(message.transfer().ticket());
            if (found == session.transfers.end()) break;
            session.words_in_use.erase(found->second->part_word);
            end(*found->second, message.transfer());
            session.transfers.erase(found);
            break;
        }
        case v1::AttachResponse::kError:
            last_error_ = Refused::text_of(message.error());
            if (!session.welcome) {
                session.hello_refused = message.error();
            } else if (pending.lookup) {
                *pending.lookup = Lookup{.error = message.error()};
            } else if (pending.transfer && message.error().reason() == v1::REASON_INTERNAL) {
                session.why = last_error_;  // no refusal: parts may be under way
            } else if (pending.transfer) {
                session.words_in_use.erase(pending.transfer->part_word);
                session.transfers.erase(pending.transfer->ticket);
                refuse(*pending.transfer, message.error());
            }
            break;
        case v1::AttachResponse::kInstance: {
            session.instance = message.instance();
            const bool asked = message.instance().reregister_ranks_size() > 0;
            if (!asked)
                session.stale = false;
            else if (!session.stale)
                session.registered = false;  // our copy worker was lost
            break;
        }
        case v1::AttachResponse::kGoodbye:
            session.why = "the daemon ended the session: " + Refused::text_of(message.goodbye().why());
            break;
        default:  // heartbeat_ack and the like; what a newer daemon says besides
            break;
    }
}

// --- what callers want ---

std::uint64_t Client::send(Session& session, v1::AttachRequest request, Pending pending) {
    const std::uint64_t id = session.next_id++;
    request.set_id(id);
    session.outgoing.push_back(std::move(request));
    session.pending.emplace(id, std::move(pending));
    changed_.notify_all();
    return id;
}

bool Client::wait_ready(Milliseconds timeout) {
    Lock lock(mutex_);
    return changed_.wait_for(lock, timeout, [this] { return session_ && session_->ready(); });
}

std::uint64_t Client::epoch() {
    Lock lock(mutex_);
    return session_ ? session_->welcome->epoch() : 0;
}

std::pair<std::string, std::string> Client::identity() {
    Lock lock(mutex_);
    if (!session_) return {};
    return {session_->welcome->layout_fingerprint(), session_->instance.namespace_digest()};
}

std::string Client::last_error() {
    Lock lock(mutex_);
    return last_error_;
}

Lookup Client::lookup(const std::vector<std::string>& hashes, bool lease, Milliseconds timeout) {
    Lock lock(mutex_);
    if (!session_ || !session_->ready()) return {.error = error_of(v1::REASON_NOT_ATTACHED, last_error_)};
    v1::AttachRequest request;
    request.mutable_lookup()->set_lease(lease);
    v1::GroupQuery& query = *request.mutable_lookup()->add_queries();
    query.set_mode(v1::LOOKUP_MODE_PREFIX);
    query.set_hashes(joined(hashes));
    const auto answer = std::make_shared<std::optional<Lookup>>();
    send(*session_, std::move(request), {.lookup = answer, .epoch = session_->welcome->epoch()});
    if (changed_.wait_for(lock, timeout, [&] { return answer->has_value(); })) return **answer;
    return {.error = error_of(v1::REASON_DEADLINE, "the daemon did not answer in time")};
}

void Client::release(const Lease& lease) {
    Lock lock(mutex_);
    if (!session_ || session_->welcome->epoch() != lease.epoch) return;  // it has ended with its epoch
    v1::AttachRequest request;
    request.mutable_release()->add_lease_ids(lease.id);
    send(*session_, std::move(request), {});
}

std::shared_ptr<Transfer> Client::begin(bool is_store, std::uint32_t blocks, std::optional<Doorbell> doorbell,
                                        v1::Signals& signals) {
    auto transfer = std::make_shared<Transfer>();
    transfer->is_store = is_store;
    transfer->blocks = blocks;
    if (!session_ || !session_->ready()) {
        refuse(*transfer, error_of(v1::REASON_NOT_ATTACHED, last_error_));
        return transfer;
    }
    while (transfer->part_word < options_.parts && session_->words_in_use.contains(transfer->part_word))
        ++transfer->part_word;
    if (transfer->part_word == options_.parts) {
        refuse(*transfer, error_of(v1::REASON_QUEUE_FULL, "every part word is in use: wait for a transfer"));
        return transfer;
    }
    transfer->page = page_;
    transfer->ticket = next_ticket_++;
    session_->words_in_use.insert(transfer->part_word);
    session_->transfers[transfer->ticket] = transfer;
    signals.set_ticket(transfer->ticket);
    signals.set_part_word(transfer->part_word);
    signals.set_gate(doorbell ? v1::GATE_DOORBELL : v1::GATE_NONE);
    if (doorbell) {
        signals.set_doorbell(doorbell->index);
        signals.set_doorbell_value(doorbell->value);
    }
    return transfer;
}

std::shared_ptr<Transfer> Client::store(const std::vector<std::string>& hashes,
                                        const std::vector<std::uint32_t>& block_ids, std::optional<Doorbell> doorbell) {
    Lock lock(mutex_);
    v1::AttachRequest request;
    v1::StoreRequest& store = *request.mutable_store();
    auto transfer = begin(true, static_cast<std::uint32_t>(hashes.size()), doorbell, *store.mutable_signals());
    if (transfer->ended) return transfer;
    store.set_hashes(joined(hashes));
    store.mutable_block_ids()->Add(block_ids.begin(), block_ids.end());
    send(*session_, std::move(request), {.transfer = transfer});
    return transfer;
}

std::shared_ptr<Transfer> Client::load(const Lease& lease, const std::vector<std::uint32_t>& block_ids,
                                       std::optional<Doorbell> doorbell) {
    Lock lock(mutex_);
    v1::AttachRequest request;
    v1::LoadRequest& load = *request.mutable_load();
    auto transfer = begin(false, static_cast<std::uint32_t>(block_ids.size()), doorbell, *load.mutable_signals());
    if (transfer->ended) return transfer;
    load.mutable_session()->set_epoch(lease.epoch);  // a lease of an earlier daemon is refused, not mistaken for another
    load.set_lease_id(lease.id);
    load.mutable_block_ids()->Add(block_ids.begin(), block_ids.end());
    send(*session_, std::move(request), {.transfer = transfer});
    return transfer;
}

void Client::refuse(Transfer& transfer, v1::Error error) {
    transfer.ended = transfer.fenced = transfer.refused = true;
    transfer.state = v1::TRANSFER_STATE_FAILED;
    transfer.succeeded.assign(transfer.blocks, '\0');
    transfer.error = std::move(error);
}

void Client::end(Transfer& transfer, const v1::TransferEvent& event) {
    transfer.ended = transfer.fenced = true;
    transfer.state = event.state();
    transfer.succeeded = event.succeeded();
    if (event.has_error()) transfer.error = event.error();
}

bool Client::wait(Transfer& transfer, Milliseconds timeout) {
    const auto deadline = Clock::now() + timeout;
    Lock lock(mutex_);
    while (!transfer.ended) {
        if (transfer.lost) {  // only its part word can tell
            reap();
            const PartState state = transfer.page->state(transfer.part_word, transfer.ticket);
            if (is_over(state)) {
                const bool landed = state == PartState::done && !transfer.is_store;
                transfer.ended = transfer.fenced = true;
                transfer.state = landed ? v1::TRANSFER_STATE_DONE : v1::TRANSFER_STATE_FAILED;
                transfer.succeeded.assign(transfer.blocks, landed ? '\1' : '\0');
                if (landed) transfer.error.reset();
                break;
            }
        }
        if (Clock::now() >= deadline) return false;
        changed_.wait_for(lock, transfer.lost ? kPoll : std::chrono::ceil<Milliseconds>(deadline - Clock::now()));
    }
    return true;
}

PartState Client::part_state(Transfer& transfer) {
    Lock lock(mutex_);
    return transfer.page ? transfer.page->state(transfer.part_word, transfer.ticket) : PartState::lost;
}

PartState Client::revoke(Transfer& transfer) {
    Lock lock(mutex_);
    if (!transfer.page) return PartState::lost;
    return transfer.page->revoke(transfer.part_word, transfer.ticket, transfer.is_store);
}

void Client::ring(std::uint32_t doorbell, std::uint64_t value) {
    Lock lock(mutex_);
    rung_.at(doorbell) = std::max(rung_.at(doorbell), value);
    if (page_) page_->ring(doorbell, value);
}

}  // namespace kvtier_example
