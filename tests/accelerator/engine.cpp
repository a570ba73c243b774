#include "engine.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <Python.h>
#include <frameobject.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

namespace sim {
namespace {

void merge(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size());
  for (size_t n = 0; n < other.size(); ++n) into[n] = std::max(into[n], other[n]);
}

uint64_t at(const Clock& clock, int stream) { return size_t(stream) < clock.size() ? clock[stream] : 0; }

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

constexpr size_t kLeast = 512;

}  // namespace

WithoutGil::WithoutGil() {
  if (Py_IsInitialized() && PyGILState_Check()) state_ = PyEval_SaveThread();
}

WithoutGil::~WithoutGil() {
  if (state_ != nullptr) PyEval_RestoreThread(static_cast<PyThreadState*>(state_));
}

Place here(const std::string& what) {
  Place place{what, ""};
  if (!Py_IsInitialized()) return place;
  const auto& library = Engine::get().library();
  auto gil = PyGILState_Ensure();
  std::string innermost;
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  int shown = 0;
  while (frame != nullptr) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    std::string file = PyUnicode_AsUTF8(code->co_filename);
    Py_DECREF(code);
    const bool is_library = !library.empty() && file.rfind(library, 0) == 0;
    const bool is_torch = file.find("/torch/") != std::string::npos;
    if (!is_torch && file[0] != '<' && shown < 4) {
      auto line = (is_library ? file.substr(library.size()) : file.substr(file.rfind('/') + 1)) + ":" +
                  std::to_string(PyFrame_GetLineNumber(frame));
      place.text += (shown++ ? " < " : " at ") + line;
      if (is_library && place.library.empty()) place.library = line;
    }
    PyFrameObject* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  PyGILState_Release(gil);
  return place;
}

Engine& Engine::get() {
  static Engine* engine = new Engine();  // never destroyed: tensors may outlive the interpreter
  return *engine;
}

Engine::Engine() { configure(1, false, ""); }

void Engine::configure(int devices, bool late, std::string library) {
  std::lock_guard<std::mutex> lock(mutex_);
  devices_ = devices;
  late_ = late;
  library_ = std::move(library);
  in_use_.resize(devices);
  most_.resize(devices);
  for (int device = int(streams_.size()); device < devices; ++device) streams_.push_back({device, {}, nullptr, {}});
}

int Engine::new_stream(int device) {
  std::lock_guard<std::mutex> lock(mutex_);
  streams_.push_back({device, {}, nullptr, {}});
  return int(streams_.size()) - 1;
}

int Engine::device_of(int stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  return streams_.at(stream).device;
}

ItemPtr Engine::issue(int stream, const std::string& what, const std::vector<Span>& spans, std::function<void()> work,
                      bool is_message) {
  const Place place = here(what);
  std::lock_guard<std::mutex> lock(mutex_);
  throw_failure();
  auto [entry, is_new] = site_numbers_.try_emplace(place.text, int(sites_.size()));
  if (is_new) sites_.push_back(place.text);
  Stream& to = streams_.at(stream);
  merge(to.clock, host_);
  if (to.clock.size() <= size_t(stream)) to.clock.resize(stream + 1);
  ++to.clock[stream];
  for (const Span& span : spans) {
    if (span.end > span.begin) check(stream, span, entry->second);
  }
  auto item = std::make_shared<Item>();
  item->what = place.text;
  item->work = std::move(work);
  item->after = std::move(to.awaits);
  to.awaits.clear();
  if (to.last && !to.last->done) item->after.push_back(to.last);
  if (is_message) {  // every process runs its messages in one order, so that none waits for another in a circle
    if (last_message_ && !last_message_->done) item->after.push_back(last_message_);
    last_message_ = item;
  }
  to.last = item;
  if (!late_) due_.push_back(item);
  if (!is_running_) {
    is_running_ = true;
    std::thread([this] { loop(); }).detach();
  }
  work_.notify_one();
  return item;
}

void Engine::check(int stream, const Span& span, int site) {
  Block* block = find(span.begin);
  if (block == nullptr) return;
  const Clock& clock = streams_[stream].clock;
  auto& accesses = block->accesses;
  for (const Access& other : accesses) {
    if (other.end <= span.begin || span.end <= other.begin || !(other.is_write || span.is_write)) continue;
    if (at(clock, other.stream) >= other.count) continue;
    report(std::string(span.is_write ? "write" : "read") + " by " + sites_[site] + " (stream " +
                     std::to_string(stream) + "), not ordered after the " + (other.is_write ? "write" : "read") +
                     " by " + sites_[other.site] + " (stream " + std::to_string(other.stream) + ")");
  }
  accesses.erase(std::remove_if(accesses.begin(), accesses.end(),
                                [&](const Access& other) {
                                  const bool is_covered = span.begin <= other.begin && other.end <= span.end;
                                  return is_covered && (span.is_write || (!other.is_write && other.stream == stream));
                                }),
                 accesses.end());
  Access access;
  static_cast<Span&>(access) = span;
  access.stream = stream;
  access.count = clock[stream];
  access.site = site;
  accesses.push_back(access);
}

void Engine::report(const std::string& race) {
  if (std::find(races_.begin(), races_.end(), race) == races_.end()) races_.push_back(race);
}

Moment Engine::record(int stream) {
  auto item = issue(stream, "event", {}, [] {});
  std::lock_guard<std::mutex> lock(mutex_);
  return {item, streams_.at(stream).clock, now()};
}

void Engine::wait_for(int stream, const Moment& moment) {
  if (!moment.item || drops("wait")) return;
  std::lock_guard<std::mutex> lock(mutex_);
  Stream& to = streams_.at(stream);
  merge(to.clock, moment.clock);
  if (!moment.item->done) to.awaits.push_back(moment.item);
}

// Host synchronisation

void Engine::note_sync(const std::string& what) {
  const Place place = here(what);
  std::lock_guard<std::mutex> lock(mutex_);
  syncs_.push_back({what, place.library});
}

void Engine::finish(const Moment& moment) {
  if (!moment.item) return;
  WithoutGil released;
  std::vector<std::shared_ptr<void>> let_go;
  std::unique_lock<std::mutex> lock(mutex_);
  if (!moment.item->done) {
    due_.push_back(moment.item);
    work_.notify_one();
    done_.wait(lock, [&] { return moment.item->done || !failure_.empty(); });
  }
  throw_failure();
  learn(moment.clock);
  for (auto kept = kept_.begin(); kept != kept_.end();) {
    if (at(host_, std::get<0>(*kept)) >= std::get<1>(*kept)) {
      let_go.push_back(std::move(std::get<2>(*kept)));
      kept = kept_.erase(kept);
    } else {
      ++kept;
    }
  }
  lock.unlock();  // destroying tensors takes it again
}

void Engine::finish_device(int device) {
  size_t count;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    count = streams_.size();
  }
  for (size_t stream = 0; stream < count; ++stream) {
    if (device < 0 || device_of(int(stream)) == device) finish(record(int(stream)));
  }
}

bool Engine::is_done(const Moment& moment) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (moment.item && !moment.item->done) return false;
  learn(moment.clock);
  return true;
}

void Engine::keep_until_done(int stream, std::shared_ptr<void> kept) {
  std::lock_guard<std::mutex> lock(mutex_);
  kept_.emplace_back(stream, at(streams_.at(stream).clock, stream), std::move(kept));
}

void Engine::learn(const Clock& clock) { merge(host_, clock); }

// Memory

char* Engine::allocate(size_t size, int device, int stream) {
  if (size == 0) return nullptr;
  size = (size + kLeast - 1) / kLeast * kLeast;
  const Place place = here("allocation");
  std::lock_guard<std::mutex> lock(mutex_);
  auto& pool = free_[{device, stream}];
  auto best = pool.end();
  for (auto block = pool.begin(); block != pool.end(); ++block) {
    const bool is_free = std::all_of((*block)->awaited.begin(), (*block)->awaited.end(),
                                     [&](const auto& use) { return at(host_, use.first) >= use.second; });
    if (is_free && (*block)->size >= size && (*block)->size <= 4 * size &&
        (best == pool.end() || (*block)->size <= (*best)->size)) {
      best = block;
    }
  }
  Block* block;
  if (best != pool.end()) {
    block = *best;
    pool.erase(best);
    merge(streams_.at(stream).clock, host_);
    const Clock& clock = streams_[stream].clock;
    for (const Access& access : block->accesses) {
      if (at(clock, access.stream) < access.count) {
        report(place.text + " (stream " + std::to_string(stream) + ") hands out memory that " +
                         sites_[access.site] + " (stream " + std::to_string(access.stream) + ") may still use");
      }
    }
    block->accesses.erase(
        std::remove_if(block->accesses.begin(), block->accesses.end(),
                       [&](const Access& access) { return at(clock, access.stream) < access.count; }),
        block->accesses.end());
  } else {
    block = new Block{static_cast<char*>(std::aligned_alloc(kLeast, size)), size, device, stream, {}, {}, {}};
    blocks_[uintptr_t(block->memory)] = block;
  }
  block->recorded.clear();
  block->awaited.clear();
  in_use_[device] += int64_t(block->size);
  most_[device] = std::max(most_[device], in_use_[device]);
  return block->memory;
}

void Engine::free(char* memory) {
  std::lock_guard<std::mutex> lock(mutex_);
  Block* block = blocks_.at(uintptr_t(memory));
  for (int stream : block->recorded) block->awaited.emplace_back(stream, at(streams_[stream].clock, stream));
  in_use_[block->device] -= int64_t(block->size);
  free_[{block->device, block->stream}].push_back(block);
}

void Engine::record_use(const void* memory, int stream) {
  if (drops("record_stream")) return;
  std::lock_guard<std::mutex> lock(mutex_);
  Block* block = find(uintptr_t(memory));
  if (block != nullptr && block->stream != stream) block->recorded.push_back(stream);
}

bool Engine::owns(const void* memory) {
  std::lock_guard<std::mutex> lock(mutex_);
  return find(uintptr_t(memory)) != nullptr;
}

int64_t Engine::allocated(int device, bool most) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (most) return std::exchange(most_.at(device), in_use_.at(device));
  return in_use_.at(device);
}

Block* Engine::find(uintptr_t address) {
  auto next = blocks_.upper_bound(address);
  if (next == blocks_.begin()) return nullptr;
  Block* block = std::prev(next)->second;
  return address < uintptr_t(block->memory) + block->size ? block : nullptr;
}

// The executor

void Engine::run(const ItemPtr& first) {
  std::vector<ItemPtr> stack{first};
  while (!stack.empty()) {
    ItemPtr item = stack.back();
    std::function<void()> work;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (item->done) {
        stack.pop_back();
        continue;
      }
      auto pending = std::find_if(item->after.begin(), item->after.end(), [](const auto& one) { return !one->done; });
      if (pending != item->after.end()) {
        stack.push_back(*pending);
        continue;
      }
      work = std::move(item->work);
    }
    try {
      at::AutoDispatchBelowADInplaceOrView no_autograd;
      if (work) work();
    } catch (const std::exception& error) {
      const std::string text = error.what();
      fail(item->what + ": " + text.substr(0, text.find("\nException raised from")));
    }
    work = nullptr;
    std::lock_guard<std::mutex> lock(mutex_);
    item->done = true;
    item->after.clear();
    stack.pop_back();
    done_.notify_all();
  }
}

void Engine::loop() {
  at::set_num_threads(1);  // the same bits whenever an operation runs; the setting is per thread
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    if (!due_.empty()) {
      ItemPtr item = due_.front();
      due_.pop_front();
      lock.unlock();
      run(item);
      item.reset();
      lock.lock();
      continue;
    }
    auto polls = late_ ? polls_ : std::vector<std::function<ItemPtr()>>();
    lock.unlock();
    ItemPtr asked;
    for (const auto& poll : polls) {
      if (!asked) asked = poll();
    }
    if (asked) run(asked);
    lock.lock();
    if (!asked && due_.empty()) work_.wait_for(lock, std::chrono::milliseconds(polls.empty() ? 100 : 1));
  }
}

void Engine::on_idle(std::function<ItemPtr()> poll) {
  std::lock_guard<std::mutex> lock(mutex_);
  polls_.push_back(std::move(poll));
}

void Engine::log_message(Message message) {
  std::lock_guard<std::mutex> lock(mutex_);
  messages_.push_back(std::move(message));
}

void Engine::fail(const std::string& error) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (failure_.empty()) failure_ = error;
  done_.notify_all();
}

void Engine::throw_failure() {
  if (!failure_.empty()) throw std::runtime_error("The simulated accelerator has failed: " + failure_);
}

// Reports

std::vector<std::string> Engine::races() {
  std::lock_guard<std::mutex> lock(mutex_);
  return races_;
}

std::vector<HostSync> Engine::syncs() {
  std::lock_guard<std::mutex> lock(mutex_);
  return syncs_;
}

std::vector<Message> Engine::messages() {
  std::lock_guard<std::mutex> lock(mutex_);
  return messages_;
}

void Engine::clear_reports() {
  std::lock_guard<std::mutex> lock(mutex_);
  races_.clear();
  syncs_.clear();
  messages_.clear();
}

void Engine::drop_next(const std::string& what, const std::string& line) {
  std::lock_guard<std::mutex> lock(mutex_);
  drop_what_ = what;
  drop_line_ = line;
}

bool Engine::drops(const std::string& what) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (drop_what_ != what) return false;
  }
  return here(what).text.find(drop_line_) != std::string::npos;
}

}  // namespace sim
