// A process group of the simulated device with NCCL's rules: a stream of its own, `wait()` orders streams and never
// blocks the host, tensors are held until `wait()`, memory is contiguous and on one device, ranks issue one sequence.
// The first call makes the group's communicator, for which the host waits until all ranks have made a call. Messages are
// sent in groups, on that communicator: NCCL would make another one, with memory of its own, for a pair of ranks.
// Sums are added up in rank order, so that an all-reduce and a reduce-scatter give the same bits. Bytes travel by Gloo.
#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <atomic>

#include "device.h"
#include "engine.h"

namespace sim {
namespace {

using c10d::OpType;
using c10d::ReduceOp;


class DeviceWork final : public c10d::Work {
 public:
  DeviceWork(int rank, OpType type, int stream, c10::Device device, Moment end, std::vector<at::Tensor> outputs,
             std::shared_ptr<std::vector<at::Tensor>> held)
      : Work(rank, type), device_(device), end_(std::move(end)), outputs_(std::move(outputs)), held_(std::move(held)) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                       std::vector<c10::Device>{device});
    c10::StreamGuard guard(c10::Stream(c10::Stream::UNSAFE, device, stream));
    future_->markCompleted(at::IValue(outputs_));
  }
  bool isCompleted() override { return engine().is_done(end_); }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override {
    engine().wait_for(stream_of(device_), end_);
    held_->clear();
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  void finish_on_host() {
    engine().note_sync("barrier");
    engine().finish(end_);
  }

 private:
  c10::Device device_;
  Moment end_;
  std::vector<at::Tensor> outputs_;
  std::shared_ptr<std::vector<at::Tensor>> held_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// What the ranks of a group have called and what they wait for, in memory that they share: per rank its collectives,
// then messages by peer; and whether it takes part in the communicator.
class Requests {
 public:
  Requests(const std::string& path, int size) : size_(size) {
    const int file = open(path.c_str(), O_RDWR | O_CREAT, 0600);
    TORCH_CHECK(file >= 0, "Expected a folder that all ranks share, got ", path);
    const size_t bytes = sizeof(std::atomic<int64_t>) * size * row();
    TORCH_CHECK(ftruncate(file, off_t(bytes)) == 0, "cannot make ", path);
    counts_ = static_cast<std::atomic<int64_t>*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
    close(file);
  }
  std::atomic<int64_t>& wanted(int rank, int subject) { return counts_[rank * row() + subject]; }
  std::atomic<int64_t>& called(int rank, int subject) { return counts_[rank * row() + size_ + 1 + subject]; }
  std::atomic<int64_t>& communicators(int rank) { return counts_[rank * row() + 2 * size_ + 2]; }
  int collectives() const { return size_; }

 private:
  int row() const { return 2 * size_ + 3; }
  int size_;
  std::atomic<int64_t>* counts_;
};

enum class Kind : int64_t { broadcast, all_reduce, reduce, all_gather, reduce_scatter, send, receive, barrier };

const char* name_of(Kind kind) {
  static const char* names[] = {"broadcast", "all_reduce", "reduce", "all_gather", "reduce_scatter", "send", "receive", "barrier"};
  return names[int64_t(kind)];
}

struct Call {
  Kind kind;
  std::vector<at::Tensor> in, out;
  int64_t root = 0;
  ReduceOp::RedOpType op = ReduceOp::SUM;
};

class DeviceGroup final : public c10d::Backend {
 public:
  DeviceGroup(int rank, int size, c10::intrusive_ptr<c10d::Backend> wire, std::string name, std::string group,
              const std::string& folder, double seconds)
      : Backend(rank, size), wire_(std::move(wire)), name_(std::move(name)), group_(std::move(group)),
        options_(c10::make_intrusive<Options>(name_, std::chrono::milliseconds(int64_t(1e3 * seconds)))),
        requests_(std::make_shared<Requests>(folder + "/" + std::to_string(std::hash<std::string>()(group_)), size)),
        messages_(size) {
    auto calls = calls_;
    auto requests = requests_;
    engine().on_idle([calls, requests, rank, size] { return asked_for(*calls, *requests, rank, size); });
  }

  const std::string getBackendName() const override { return name_; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return uint64_t(issued_); }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& opts) override {
    return start(OpType::BROADCAST, {Kind::broadcast, tensors, tensors, opts.rootRank}, opts.asyncOp);
  }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& opts) override {
    return start(OpType::ALLREDUCE, {Kind::all_reduce, tensors, tensors, 0, opts.reduceOp}, opts.asyncOp);
  }
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(std::vector<at::Tensor>& tensors,
                                                     const c10d::AllreduceCoalescedOptions& opts) override {
    return start(OpType::ALLREDUCE_COALESCED, {Kind::all_reduce, tensors, tensors, 0, opts.reduceOp}, opts.asyncOp);
  }
  c10::intrusive_ptr<c10d::Work> reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& opts) override {
    return start(OpType::REDUCE, {Kind::reduce, tensors, tensors, opts.rootRank, opts.reduceOp}, opts.asyncOp);
  }
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& out, std::vector<at::Tensor>& in,
                                           const c10d::AllgatherOptions& opts) override {
    for (const auto& tensor : out.at(0)) {
      TORCH_CHECK(tensor.numel() == in.at(0).numel(), "Expected segments of one size, got ", tensor.numel(), " and ", in[0].numel());
    }
    return start(OpType::ALLGATHER, {Kind::all_gather, in, out.at(0)}, opts.asyncOp);
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& opts) override {
    TORCH_CHECK(out.numel() == in.numel() * size_, "Expected ", size_, " equal segments, got ", out.numel(), " of ", in.numel());
    return start(OpType::_ALLGATHER_BASE, {Kind::all_gather, {in}, {out}}, opts.asyncOp);
  }
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(std::vector<at::Tensor>& out, std::vector<at::Tensor>& in,
                                                                 const c10d::AllgatherOptions& opts) override {
    startCoalescing();
    for (size_t n = 0; n < in.size(); ++n) _allgather_base(out[n], in[n], opts);
    return endCoalescing();
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& opts) override {
    TORCH_CHECK(in.numel() == out.numel() * size_, "Expected ", size_, " equal segments, got ", in.numel(), " for ", out.numel());
    return start(OpType::_REDUCE_SCATTER_BASE, {Kind::reduce_scatter, {in}, {out}, 0, opts.reduceOp}, opts.asyncOp);
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(std::vector<at::Tensor>& out, std::vector<at::Tensor>& in,
                                                                 const c10d::ReduceScatterOptions& opts) override {
    startCoalescing();
    for (size_t n = 0; n < in.size(); ++n) _reduce_scatter_base(out[n], in[n], opts);
    return endCoalescing();
  }
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int peer, int) override {
    return start(OpType::SEND, {Kind::send, tensors, {}, checked(peer)}, true);
  }
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int peer, int) override {
    return start(OpType::RECV, {Kind::receive, {}, tensors, checked(peer)}, true);
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& opts) override {
    const auto device = opts.device.value_or(c10::Device(c10::DeviceType::PrivateUse1, device_ < 0 ? 0 : c10::DeviceIndex(device_)));
    std::vector<at::Tensor> one{at::zeros({1}, at::TensorOptions().device(device))};
    auto work = start(OpType::BARRIER, {Kind::barrier, one, one}, true);
    static_cast<DeviceWork*>(work.get())->finish_on_host();
    return work;
  }
  void startCoalescing() override { is_grouped_ = true; }
  c10::intrusive_ptr<c10d::Work> endCoalescing() override {
    is_grouped_ = false;
    auto calls = std::move(grouped_);
    grouped_.clear();
    if (calls.empty()) return nullptr;
    return enqueue(OpType::COALESCED, std::move(calls));
  }

 private:
  struct Issued {
    ItemPtr item;
    int64_t collective = -1;                       // its number among the group's collectives, or
    std::vector<std::pair<int, int64_t>> by_peer;  // its numbers among the messages with each peer
  };
  struct Issues {
    std::mutex mutex;
    std::deque<Issued> all;
  };

  int64_t checked(int peer) const {  // tags are ignored, as NCCL ignores them: messages match in the order of issue
    TORCH_CHECK(peer != rank_, "Expected another rank, got a message to oneself");
    return peer;
  }

  static ItemPtr asked_for(Issues& calls, Requests& requests, int rank, int size) {
    std::lock_guard<std::mutex> lock(calls.mutex);
    while (!calls.all.empty() && calls.all.front().item->done) calls.all.pop_front();
    int64_t wanted = 0;
    for (int peer = 0; peer < size; ++peer) wanted = std::max(wanted, requests.wanted(peer, requests.collectives()).load());
    for (const auto& call : calls.all) {
      if (call.item->done) continue;
      if (call.collective >= 0 && call.collective < wanted) return call.item;
      for (const auto& [peer, number] : call.by_peer) {
        if (number < requests.wanted(peer, rank).load()) return call.item;
      }
    }
    return nullptr;
  }

  void check_tensor(const at::Tensor& tensor) {
    TORCH_CHECK(tensor.device().type() == c10::DeviceType::PrivateUse1, "Expected a tensor of the device, got one of ", tensor.device());
    TORCH_CHECK(tensor.is_contiguous(), "Expected a contiguous tensor, got strides ", tensor.strides());
    if (device_ < 0) make_communicator(tensor.device().index());
    TORCH_CHECK(tensor.device().index() == device_, "Expected device ", device_, " in all collectives of one group, got ", tensor.device());
  }

  void make_communicator(int device) {
    device_ = device;
    stream_ = engine().new_stream(device);
    requests_->communicators(rank_).store(1);
    WithoutGil released;
    const auto until = std::chrono::steady_clock::now() + options_->timeout;
    for (int rank = 0; rank < size_; ++rank) {
      while (!requests_->communicators(rank).load()) {
        TORCH_CHECK(std::chrono::steady_clock::now() < until, "Expected a first call of rank ", rank, " on ", group_,
                    " within its time-out, for the communicator of all ranks");
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
    }
  }

  c10::intrusive_ptr<c10d::Work> start(OpType type, Call call, bool) {
    for (const auto& tensor : call.in) check_tensor(tensor);
    for (const auto& tensor : call.out) check_tensor(tensor);
    if (is_grouped_) {
      grouped_.push_back(std::move(call));
      return nullptr;
    }
    TORCH_CHECK(call.kind != Kind::send && call.kind != Kind::receive, "Expected messages in a group, as of ",
                "batch_isend_irecv, got a ", name_of(call.kind), " by itself, for which NCCL makes another communicator");
    return enqueue(type, {std::move(call)});
  }

  c10::intrusive_ptr<c10d::Work> enqueue(OpType type, std::vector<Call> calls) {
    const c10::Device device(c10::DeviceType::PrivateUse1, c10::DeviceIndex(device_));
    c10::DeviceGuard guard(device);
    const int stream = stream_;
    engine().wait_for(stream, engine().record(stream_of(device)));
    std::vector<Span> spans;
    std::vector<at::Tensor> outputs;
    auto held = std::make_shared<std::vector<at::Tensor>>();
    Issued issued;
    std::string what;
    for (auto& call : calls) {
      for (auto& tensor : call.in) {
        spans.push_back(span_of(tensor, false));
        held->push_back(tensor);
        tensor = on_host(tensor);
      }
      for (auto& tensor : call.out) {
        spans.push_back(span_of(tensor, true));
        held->push_back(tensor);
        outputs.push_back(tensor);
        tensor = on_host(tensor);
      }
      what = name_of(call.kind);
      const auto& first = call.in.empty() ? call.out.at(0) : call.in.at(0);
      engine().log_message({group_, what, std::string(c10::toString(first.scalar_type())), first.numel()});
      if (call.kind == Kind::send || call.kind == Kind::receive) issued.by_peer.emplace_back(int(call.root), messages_[call.root]++);
    }
    if (issued.by_peer.empty()) issued.collective = issued_++;
    if (issued.collective >= 0) raise(requests_->called(rank_, requests_->collectives()), issued.collective + 1);
    for (const auto& [other, number] : issued.by_peer) raise(requests_->called(rank_, other), number + 1);
    const auto subject = issued;
    auto run = [wire = wire_, requests = requests_, rank = rank_, size = size_, group = group_, calls, subject]() mutable {
      if (subject.collective >= 0) raise(requests->wanted(rank, requests->collectives()), subject.collective + 1);
      for (const auto& [other, number] : subject.by_peer) raise(requests->wanted(rank, other), number + 1);
      perform(*wire, rank, size, group, subject.collective, calls);
    };
    auto missing = [requests = requests_, rank = rank_, size = size_, subject] { return missing_in(*requests, rank, size, subject); };
    issued.item = engine().issue(stream, what, spans, run, Work::message, missing);
    {
      std::lock_guard<std::mutex> lock(calls_->mutex);
      calls_->all.push_back(issued);
    }
    engine().keep_until_done(stream, held);
    auto end = engine().record(stream);
    return c10::make_intrusive<DeviceWork>(rank_, type, stream, device, end, outputs, held);
  }

  // The ranks that have not called what this one has called, for people.
  static std::string missing_in(Requests& requests, int rank, int size, const Issued& call) {
    std::string found;
    auto note = [&](int other) { found += (found.empty() ? "rank " : ", ") + std::to_string(other); };
    for (int other = 0; call.collective >= 0 && other < size; ++other) {
      if (requests.called(other, requests.collectives()).load() <= call.collective) note(other);
    }
    for (const auto& [other, number] : call.by_peer) {
      if (requests.called(other, rank).load() <= number) note(other);
    }
    return found;
  }

  static void raise(std::atomic<int64_t>& count, int64_t to) {
    if (count.load() < to) count.store(to);
  }

  static at::Tensor gathered(c10d::Backend& wire, int size, const at::Tensor& mine) {
    auto raw = mine.contiguous().view(-1).view(at::kByte);
    auto all = at::empty({int64_t(size) * raw.numel()}, raw.options());
    if (raw.numel()) wire._allgather_base(all, raw, {})->wait();
    return all.view(mine.scalar_type()).view({size, mine.numel()});
  }

  static at::Tensor combined(const at::Tensor& rows, ReduceOp::RedOpType op) {
    const double share = 1.0 / double(rows.size(0));
    auto row = [&](int64_t rank) { return op == ReduceOp::AVG ? rows[rank].mul(share) : rows[rank]; };
    auto total = row(0).clone();
    for (int64_t rank = 1; rank < rows.size(0); ++rank) {
      if (op == ReduceOp::SUM || op == ReduceOp::AVG) total.add_(row(rank));
      else if (op == ReduceOp::MAX) total = at::maximum(total, row(rank));
      else if (op == ReduceOp::MIN) total = at::minimum(total, row(rank));
      else if (op == ReduceOp::PRODUCT) total.mul_(row(rank));
      else TORCH_CHECK(false, "no such reduction on the simulated device");
    }
    return total;
  }

  static void check_sequence(c10d::Backend& wire, int rank, int size, const std::string& group, int64_t number, const Call& call) {
    const auto& first = call.in.empty() ? call.out.at(0) : call.in.at(0);
    auto mine = at::tensor({number, int64_t(call.kind), first.numel(), int64_t(first.scalar_type()), call.root, int64_t(call.op)}, at::kLong);
    auto all = gathered(wire, size, mine);
    for (int other = 0; other < size; ++other) {
      TORCH_CHECK(at::equal(all[other], mine), "Expected the same collective on all ranks of ", group, ", got ", name_of(call.kind),
                  " of ", first.numel(), " ", c10::toString(first.scalar_type()), " as number ", number, " on rank ", rank,
                  " and ", name_of(Kind(all[other][1].item<int64_t>())), " of ", all[other][2].item<int64_t>(), " ",
                  c10::toString(at::ScalarType(all[other][3].item<int64_t>())), " as number ", all[other][0].item<int64_t>(), " on rank ", other);
    }
  }

  static void perform(c10d::Backend& wire, int rank, int size, const std::string& group, int64_t number, std::vector<Call>& calls) {
    std::vector<c10::intrusive_ptr<c10d::Work>> waits;
    std::vector<at::Tensor> alive;
    std::vector<std::pair<at::Tensor, at::Tensor>> headers;  // received and expected
    for (auto& call : calls) {
      if (call.kind != Kind::send && call.kind != Kind::receive) continue;
      const bool sends = call.kind == Kind::send;
      const auto& tensor = (sends ? call.in : call.out).at(0);
      auto raw = tensor.view(-1).view(at::kByte);
      auto header = at::tensor({tensor.numel(), int64_t(tensor.scalar_type())}, at::kLong);
      auto told = sends ? header : at::empty_like(header);
      if (!sends) headers.emplace_back(told, header);
      for (auto part : {told.view(at::kByte), raw}) {
        std::vector<at::Tensor> one{part};
        alive.push_back(part);
        waits.push_back(sends ? wire.send(one, int(call.root), 7) : wire.recv(one, int(call.root), 7));
      }
    }
    for (auto& work : waits) work->wait();
    for (auto& [told, expected] : headers) {
      TORCH_CHECK(at::equal(told, expected), "Expected a message of ", expected[0].item<int64_t>(), " elements on rank ", rank,
                  ", got one of ", told[0].item<int64_t>());
    }
    for (auto& call : calls) {
      if (call.kind == Kind::send || call.kind == Kind::receive) continue;
      check_sequence(wire, rank, size, group, number, call);
      for (size_t n = 0; n < call.in.size(); ++n) {
        const auto& in = call.in[n];
        if (call.kind == Kind::broadcast) {
          std::vector<at::Tensor> raw{in.view(-1).view(at::kByte)};
          c10d::BroadcastOptions opts;
          opts.rootRank = call.root;
          if (raw[0].numel()) wire.broadcast(raw, opts)->wait();
          continue;
        }
        auto rows = gathered(wire, size, in);
        if (call.kind == Kind::all_reduce || call.kind == Kind::barrier) call.out[n].view(-1).copy_(combined(rows, call.op));
        if (call.kind == Kind::reduce && rank == call.root) call.out[n].view(-1).copy_(combined(rows, call.op));
        if (call.kind == Kind::reduce_scatter) {
          call.out[n].view(-1).copy_(combined(rows.view({size, size, -1}).select(1, rank), call.op));
        }
        if (call.kind == Kind::all_gather && call.out.size() == 1) call.out[0].view(-1).copy_(rows.view(-1));
        for (size_t other = 0; call.kind == Kind::all_gather && call.out.size() > 1 && other < call.out.size(); ++other) {
          call.out[other].view(-1).copy_(rows[int64_t(other)]);
        }
      }
    }
  }

  c10::intrusive_ptr<c10d::Backend> wire_;
  std::string name_, group_;
  c10::intrusive_ptr<Options> options_;
  std::shared_ptr<Requests> requests_;
  std::shared_ptr<Issues> calls_ = std::make_shared<Issues>();
  std::vector<int64_t> messages_;  // sent and received so far, by peer
  std::vector<Call> grouped_;
  int64_t issued_ = 0;
  int device_ = -1, stream_ = -1;
  bool is_grouped_ = false;
};

}  // namespace

void init_collectives(pybind11::module_& m) {
  pybind11::class_<DeviceGroup, c10::intrusive_ptr<DeviceGroup>, c10d::Backend>(m, "DeviceGroup")
      .def(pybind11::init([](int rank, int size, const c10::intrusive_ptr<c10d::Backend>& wire, const std::string& name,
                             const std::string& group, const std::string& folder, double seconds) {
        return c10::make_intrusive<DeviceGroup>(rank, size, wire, name, group, folder, seconds);
      }));
}

}  // namespace sim
