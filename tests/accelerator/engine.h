// The simulated accelerator's streams, memory and clocks. Device memory is host memory; every operation is an item in
// the queue of a stream. It runs once what it comes after is done, at once or as late as anybody needs its result:
// kernels and copies on one executor thread, a message on a thread of its own. So a stream behind a collective is stuck
// until all ranks have called that collective, other streams go on, and whoever synchronizes with it waits.
//
// Happens-before is kept by vector clocks at issue, whatever the executor does: an operation is ordered after all
// earlier ones of its stream, after the events that its stream has waited for, and after whatever the host has waited
// for. Two unordered accesses to the same bytes, one of them a write, are a race. One clock serves all host threads.
//
// Threads but the main one and autograd's stand *aside* of training. They are at fault where they may wait for work
// that needs a peer, which may wait for them: see `Engine::blame`. A free goes to the allocator's cache and waits for
// nothing. What a thread aside reads and a stuck stream will write later is no race: the write could not begin before.
//
// A process may have several devices. Once it is known on which one training is, all use of another device is a fault,
// as a kernel on one device that uses memory of another is at any time.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

namespace sim {

using Clock = std::vector<uint64_t>;

enum class Work { kernel, copy, event, message };

struct Item {
  std::string what;
  Work kind;
  std::function<void()> work;
  std::vector<std::shared_ptr<Item>> after, before;
  size_t pending = 0;  // of those in `after`
  bool is_wanted = false, done = false;
  Clock awaited;  // what the host knows once it is done, if the host waits for it
  std::function<std::string()> missing;  // of a message: the ranks that have not called it; empty if all have
  std::vector<std::pair<std::shared_ptr<Item>, std::string>> races_unless_stuck;  // of a thread aside, with others
};
using ItemPtr = std::shared_ptr<Item>;

// A point in a stream: reached once `item` is done.
struct Moment {
  ItemPtr item;
  Clock clock;
  double seconds = 0;
};

struct Span {
  uintptr_t begin, end;
  bool is_write;
};

struct Access : Span {
  int stream;
  uint64_t count;
  int site;
  ItemPtr item;
  bool is_aside;
};

struct Block {
  char* memory;
  size_t size;
  int device, stream;
  std::vector<Access> accesses;
  std::vector<int> recorded;                      // streams named by record_stream() since it was handed out
  std::vector<std::pair<int, uint64_t>> awaited;  // what those had been given to do when it was freed
};

struct Stream {
  int device;
  Clock clock;
  ItemPtr last;
  std::vector<ItemPtr> awaits;  // of its next item
  bool trains = false;          // is given work by a thread that trains
};

struct HostSync {
  std::string what, site;
};

struct Message {
  std::string group, kind, dtype;
  int64_t numel;
};

struct Place {
  std::string text;        // the operation, with the innermost lines of Python
  std::string library;     // the innermost line of the library under test; empty if there is none
};

class Engine {
 public:
  static Engine& get();

  void configure(int devices, bool late, std::string library);
  int devices() const { return devices_; }
  bool is_late() const { return late_; }
  const std::string& library() const { return library_; }
  void train_on(int device) { home_ = device; }  // on any for -1

  // Streams. `stream` is a number over all devices; the first ones are the devices' default streams.
  int new_stream(int device);
  int device_of(int stream);

  // Issue work to a stream that reads and writes device memory.
  ItemPtr issue(int stream, const std::string& what, const std::vector<Span>& spans, std::function<void()> work,
                Work kind = Work::kernel, std::function<std::string()> missing = nullptr);
  Moment record(int stream);
  void wait_for(int stream, const Moment& moment);

  // Host synchronisation
  void note_sync(const std::string& what);
  void finish(const Moment& moment);
  void finish_device(int device);  // of all devices for -1
  bool is_done(const Moment& moment);
  void keep_until_done(int stream, std::shared_ptr<void> kept);

  // Note a fault if this thread stands aside of training.
  void blame(const std::string& what);

  // Memory
  char* allocate(size_t size, int device, int stream);
  void free(char* memory);
  void record_use(const void* memory, int stream);
  int device_at(const void* memory);  // -1 if it is none of a device
  int64_t allocated(int device, bool most);

  // Messages of other processes: `poll` is asked by the idle executor for items that a peer waits for
  void on_idle(std::function<ItemPtr()> poll);
  void log_message(Message message);
  void fail(const std::string& error);

  // Reports
  std::vector<std::string> races();
  std::vector<std::string> faults();
  std::vector<HostSync> syncs();
  std::vector<Message> messages();
  void clear_reports();
  void drop_next(const std::string& what, const std::string& line);
  bool drops(const std::string& what);

 private:
  Engine();
  void check(int stream, const Span& span, int site, const ItemPtr& item, bool is_aside,
             std::vector<std::string>& unless_stuck);
  void report(const std::string& race);
  void note_fault(const std::string& fault);
  void check_home(int device, const std::string& what);
  void want(const ItemPtr& item);
  void make_ready(const ItemPtr& item);
  void run(const ItemPtr& item);
  void complete(const ItemPtr& item);
  ItemPtr stuck_behind(const ItemPtr& item);
  bool trains_on(int device);
  void loop();
  void learn(const Clock& clock);
  void throw_failure();
  Block* find(uintptr_t address);

  std::mutex mutex_;
  std::condition_variable work_, done_;
  std::deque<ItemPtr> ready_;
  std::vector<Stream> streams_;
  std::map<uintptr_t, Block*> blocks_;
  std::map<std::pair<int, int>, std::vector<Block*>> free_;
  std::vector<int64_t> in_use_, most_;
  std::unordered_map<std::string, int> site_numbers_;
  std::vector<std::string> sites_;
  std::vector<std::string> races_, faults_;
  std::vector<HostSync> syncs_;
  std::vector<Message> messages_;
  std::vector<std::tuple<int, uint64_t, std::shared_ptr<void>>> kept_;
  std::vector<std::function<ItemPtr()>> polls_;
  std::string drop_what_, drop_line_;
  Clock host_;
  std::string failure_, library_;
  int devices_ = 1;
  std::atomic<int> home_{-1};
  bool late_ = false;
  bool is_running_ = false;
};

Place here(const std::string& what);  // where Python is now on this thread

class WithoutGil {  // the executor must be able to destroy what belongs to Python
 public:
  WithoutGil();
  ~WithoutGil();

 private:
  void* state_ = nullptr;
};

inline Engine& engine() { return Engine::get(); }

}  // namespace sim
