import LesonnxScheduler

let r = try SchedulerBenchmark.run()
print(r)
