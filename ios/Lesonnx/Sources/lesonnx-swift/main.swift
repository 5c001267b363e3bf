import Foundation
import LesonnxScheduler

/// A line for the person at the terminal, beside what the command prints.
func say(_ line: String) {
    FileHandle.standardError.write(Data((line + "\n").utf8))
}

let usage = """
    usage: lesonnx-swift COMMAND
      \(RunCommand.usage)
      \(InspectCommand.usage)
      \(FetchCommand.usage)
      scheduler
    """

func command(_ words: [String]) async throws {
    switch words.first {
    case "run": try await RunCommand.run(words.dropFirst())
    case "inspect": try InspectCommand.run(words.dropFirst())
    case "fetch": try await FetchCommand.run(words.dropFirst())
    case "scheduler": try SchedulerBenchmark.report()
    case "--help", "-h", nil: print(usage)
    default: throw LesonnxError.input("unknown command '\(words[0])'\n\(usage)")
    }
}

do {
    try await command(Array(CommandLine.arguments.dropFirst()))
} catch {
    say("error: \(error)")
    exit((error as? LesonnxError)?.isInput == true ? 2 : 1)
}
