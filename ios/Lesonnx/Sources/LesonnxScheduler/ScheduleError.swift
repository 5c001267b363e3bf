/// A fault of the host: an event that cannot happen, or a shape that makes no sense. Its text is one line.
public struct ScheduleError: Error, Equatable, CustomStringConvertible {
    public let description: String

    public init(_ description: String) {
        self.description = description
    }
}
