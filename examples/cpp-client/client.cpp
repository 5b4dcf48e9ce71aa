// What callers want of a client. The session behind it is in session.cpp.
#include "client.hpp"

#include <algorithm>

#include "session.hpp"

namespace kvtier_example {

namespace v1 = kvtier::v1;

namespace {

constexpr Milliseconds kPoll{5};

std::string joined(const std::vector<std::string>& hashes) {
    std::string all;
    for (const std::string& hash : hashes) all += hash;
    return all;
}

}  // namespace

v1::Error error_of(v1::Reason reason, const std::string& message) {
    v1::Error error;
    error.set_reason(reason);
    error.set_message(message);
    return error;
}

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
    if (!session_ || session_->welcome->epoch() != lease.epoch) return;  // the lease has ended with its epoch
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
        if (transfer.lost) {  // now only its part word can tell
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
